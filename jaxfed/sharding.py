# SPDX-License-Identifier: Apache-2.0
"""The only file that knows about meshes."""

import jax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

AXIS = "clients"


def client_mesh(devices=None) -> jax.sharding.Mesh:
    """Return a one-axis mesh named ``"clients"``.

    Args:
      devices: devices to use; None: all of them.

    Returns:
      Mesh with an ``Auto`` axis, under which every rule runs as written.
    """
    devices = jax.devices() if devices is None else devices
    return jax.make_mesh(
        (len(devices),), (AXIS,), axis_types=(AxisType.Auto,), devices=devices
    )


def shard_clients(tree, mesh):
    """Put a stacked tree on the mesh, clients spread over its devices.

    Raises:
      ValueError: if the number of clients is no multiple of the number of devices.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if leaf.shape[0] % mesh.size:
            raise ValueError(
                f"cannot spread {leaf.shape[0]} clients"
                f" (leaf {jax.tree_util.keystr(path)}) over {mesh.size} devices: use a "
                "multiple, or fewer devices."
            )
    return jax.device_put(tree, NamedSharding(mesh, P(AXIS)))


def over_clients(tree, mesh):
    """Constrain a stacked tree to be spread over clients; no mesh: unchanged."""
    return _constrain(tree, mesh, lambda x: P(AXIS) if _fits(x, 0, mesh) else P())


def over_parameters(tree, mesh):
    """Constrain a stacked tree to be spread over its first parameter axis that fits."""

    def spec(x):
        for axis in range(1, x.ndim):
            if _fits(x, axis, mesh):
                return P(*[None] * axis, AXIS)
        return P()

    return _constrain(tree, mesh, spec)


def replicated(tree, mesh):
    """Constrain a tree to be whole on every device; no mesh: unchanged."""
    return _constrain(tree, mesh, lambda x: P())


def _fits(x, axis, mesh):
    return x.ndim > axis and x.shape[axis] % mesh.size == 0


def _constrain(tree, mesh, spec):
    if mesh is None:
        return tree

    def leaf(x):
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec(x)))

    return jax.tree.map(leaf, tree)
