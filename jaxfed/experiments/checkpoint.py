# SPDX-License-Identifier: Apache-2.0
"""Checkpoints by Orbax: committed by one rename, checksummed, never unpickled."""

import hashlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

KEEP = 2


def digest(tree) -> str:
    """Return the SHA-256, in hex, of a tree's names, types, shapes and bits."""
    sha = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        array = np.asarray(leaf)
        name = jax.tree_util.keystr(path)
        sha.update(f"{name} {array.dtype} {array.shape}\n".encode())
        sha.update(np.ascontiguousarray(array))
    return sha.hexdigest()


class Checkpoints:
    """The checkpoints of one run folder, the last two of them.

    Each has three items: ``state`` (everything, to continue), ``params`` (the model
    alone, to use) and ``meta`` (JSON: the round, what run it is, and the checksum).
    """

    def __init__(self, folder):
        import orbax.checkpoint as ocp

        self._ocp = ocp
        self.folder = Path(folder).resolve()
        self._manager = ocp.CheckpointManager(
            self.folder,
            options=ocp.CheckpointManagerOptions(
                max_to_keep=KEEP, enable_async_checkpointing=False, create=True
            ),
        )

    def save(self, step, state, params, meta):
        """Write one checkpoint; when this returns it is complete on disk."""
        args = self._ocp.args
        meta = meta | {"round": step, "state_sha256": digest(state)}
        self._manager.save(
            step,
            args=args.Composite(
                state=args.StandardSave(state),
                params=args.StandardSave(params),
                meta=args.JsonSave(meta),
            ),
        )
        self._manager.wait_until_finished()

    def latest(self) -> int | None:
        """Return the newest complete checkpoint's round, None if there is none."""
        return self._manager.latest_step()

    def meta(self, step):
        """Return what was saved as ``meta``.

        Raises:
          ValueError: if it cannot be read.
        """
        args = self._ocp.args
        try:
            meta = self._manager.restore(
                step, args=args.Composite(meta=args.JsonRestore())
            ).meta
            if meta["round"] != step or not isinstance(meta["state_sha256"], str):
                raise ValueError("its meta data do not belong to it")
            return meta
        except Exception as error:
            raise self._damaged(step, error) from error

    def load(self, step, like):
        """Return the state saved at a round, checked against its checksum.

        Args:
          step: the round.
          like: tree of ``ShapeDtypeStruct``; where they have a sharding it is used.

        Raises:
          ValueError: if the checkpoint is damaged, naming the folder to delete.
        """
        args = self._ocp.args
        wanted = self.meta(step)["state_sha256"]
        try:
            state = self._manager.restore(
                step, args=args.Composite(state=args.StandardRestore(like))
            ).state
        except Exception as error:
            raise self._damaged(step, error) from error
        if digest(state) != wanted:
            raise self._damaged(step, "its checksum does not match")
        return state

    def close(self):
        """Release the manager's resources."""
        self._manager.close()

    def _damaged(self, step, why):
        # Whatever the libraries below raise on damaged files, the remedy is the same.
        reason = str(why).strip().splitlines() or [type(why).__name__]
        others = [s for s in self._manager.all_steps() if s < step]
        then = f"continue from round {max(others)}" if others else "start from round 0"
        return ValueError(
            f"the checkpoint of round {step} is damaged ({reason[0][:200]}). Delete "
            f"the folder {self.folder / str(step)} and resume again to {then}."
        )


def load_params(folder, step=None):
    """Return the model's parameters saved in a run folder, as NumPy arrays.

    Args:
      folder: a run folder.
      step: the round, None for the newest.

    Returns:
      Nested dict of arrays, as the Flax model takes them (``{"params": result}``).

    Raises:
      ValueError: if there is no such checkpoint, or it is damaged.
    """
    checkpoints = Checkpoints(Path(folder) / "checkpoints")
    try:
        step = checkpoints.latest() if step is None else step
        if step is None or not (checkpoints.folder / str(step)).is_dir():
            raise ValueError(f"{folder} has no checkpoint{f' {step}' if step else ''}.")
        args = checkpoints._ocp.args
        tree = checkpoints._manager.restore(
            step, args=args.Composite(params=args.StandardRestore())
        ).params
    finally:
        checkpoints.close()
    return jax.tree.map(np.asarray, tree)
