# SPDX-License-Identifier: Apache-2.0
"""Image-classification sets by name: read once, cached, never downloaded silently."""

import contextlib
import difflib
import hashlib
import json
import logging
import os
import re
import tempfile
import warnings
import zipfile
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxfed._validate import count

_NAME = re.compile(r"(\w+)(?:/([\w.+-]+))?(?::([\d.*]+))?")
_VERSION = re.compile(r"\d+\.\d+\.\d+")
_COMMON = ("cifar10", "cifar100", "emnist", "fashion_mnist", "kmnist", "mnist")
_CACHE_FORMAT = 1
_CHUNK = 1000


class Dataset(NamedTuple):
    """A data set in host memory.

    Attributes:
      name: the name it was loaded by.
      train: ``{"image": [N, H, W, C], "label": int32 [N]}``; images are ``float32``,
        or ``uint8`` from 0 to 255 as stored.
      test: the same for the test examples.
      num_classes: number of classes; labels lie in ``[0, num_classes)``.
    """

    name: str
    train: dict[str, np.ndarray]
    test: dict[str, np.ndarray]
    num_classes: int


class DatasetNotFoundError(ValueError):
    """The data set is not on this machine in a form that can be read."""


def load(name, data_dir=None, cache_dir=None, *, max_train=None, max_test=None):
    """Load a data set by name.

    ``"digits"`` ships with scikit-learn: 1,797 images of 8x8 pixels, scaled to [0, 1].
    Its split is fixed: of every class a random fifth (NumPy generator, seed 0) is for
    testing, which leaves 1,438 training and 359 test examples.

    Any other name is that of a set prepared by TensorFlow Datasets, written
    ``name[/config][:version]``, in ``array_record`` format (which is read without
    TensorFlow). The newest version is taken when none is given, the split
    ``validation`` when there is no ``test``. Nothing is ever downloaded.

    Args:
      name: which set.
      data_dir: folder that holds prepared sets. Default: the environment variable
        ``TFDS_DATA_DIR``, else ``~/tensorflow_datasets``.
      cache_dir: folder for the decoded arrays. Default: ``JAXFED_CACHE_DIR``, else
        ``jaxfed`` in ``XDG_CACHE_HOME`` or ``~/.cache``. If it cannot be written to,
        the set is decoded again each time.
      max_train: keep only that many training examples (the first ones).
      max_test: keep only that many test examples (the first ones).

    Returns:
      A :class:`Dataset`.

    Raises:
      DatasetNotFoundError: the set is not there; the text says where it was looked for
        and how to get it.
      ValueError: the set is not one of images with class labels, or cannot be read.
      ImportError: scikit-learn or tensorflow-datasets is not installed.

    Cost:
      A first load decodes every image (about 0.1 ms each) and keeps a copy of ``N H W
      C`` bytes in the cache; later loads read that copy and do not import
      tensorflow-datasets. With a limit and no cached copy, only the examples asked for
      are decoded, and nothing is cached.

    Example:
      >>> from jaxfed.data import load
      >>> digits = load("digits", max_train=100)
      >>> digits.train["image"].shape, digits.test["label"].shape, digits.num_classes
      ((100, 8, 8, 1), (359,), 10)
    """
    if not isinstance(name, str):
        raise TypeError(f"name must be a string such as 'digits', got {name!r}.")
    limits = {"train": max_train, "test": max_test}
    for split, limit in limits.items():
        if limit is not None:
            count(f"max_{split}", limit)
    if name == "digits":
        data = _digits()
    else:
        data = _from_tfds(name, data_dir, cache_dir, limits)
    return data._replace(
        train={k: v[:max_train] for k, v in data.train.items()},
        test={k: v[:max_test] for k, v in data.test.items()},
    )


def _digits():
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise _not_installed("digits", "scikit-learn") from error
    raw = load_digits()
    label = raw.target.astype(np.int32)
    rng = np.random.default_rng(0)
    parts = {"train": [], "test": []}
    for c in range(10):
        index = rng.permutation(np.flatnonzero(label == c))
        held_out = round(len(index) / 5)
        parts["test"].append(index[:held_out])
        parts["train"].append(index[held_out:])
    image = (raw.images[..., None] / 16).astype(np.float32)
    splits = {}
    for split, pieces in parts.items():
        index = rng.permutation(np.concatenate(pieces))
        splits[split] = {"image": image[index], "label": label[index]}
    return Dataset("digits", num_classes=10, **splits)


def _from_tfds(name, data_dir, cache_dir, limits):
    folder = _find(name, data_dir)
    cache = _cache_file(folder, name, cache_dir)
    splits = _read_cache(cache)
    if splits is None:
        splits = _decode(folder, name, limits)
        if not any(limits.values()):
            _write_cache(cache, splits)
    num_classes = int(splits.pop("num_classes"))
    return Dataset(
        name,
        train={k: splits[f"train_{k}"] for k in ("image", "label")},
        test={k: splits[f"test_{k}"] for k in ("image", "label")},
        num_classes=num_classes,
    )


# Where a prepared set lies: root/name[/config]/version.


def _versions(folder):
    """The versions prepared under ``folder``, oldest first."""
    try:
        found = [
            p.name
            for p in Path(folder).iterdir()
            if _VERSION.fullmatch(p.name) and (p / "features.json").is_file()
        ]
    except OSError:
        return []
    return sorted(found, key=lambda v: [int(x) for x in v.split(".")])


def _configs(folder):
    try:
        return sorted(p.name for p in Path(folder).iterdir() if _versions(p))
    except OSError:
        return []


def _on_disk(root):
    try:
        names = sorted(p.name for p in root.iterdir())
    except OSError:
        return []
    return [n for n in names if _versions(root / n) or _configs(root / n)]


def _find(name, data_dir):
    """Return the folder of a prepared set, or raise DatasetNotFoundError."""
    if data_dir is not None:
        root, source = data_dir, "data_dir"
    elif os.environ.get("TFDS_DATA_DIR"):
        root, source = os.environ["TFDS_DATA_DIR"], "TFDS_DATA_DIR"
    else:
        root, source = "~/tensorflow_datasets", "the default"
    root = Path(root).expanduser()
    match = _NAME.fullmatch(name)
    if not match:
        raise _not_found(name, root, source)
    base, config, version = match.groups()
    folder = root / base / config if config else root / base
    configs = [] if config or _versions(folder) else _configs(folder)
    if len(configs) > 1:
        raise DatasetNotFoundError(
            f"name={name!r} is prepared in {folder} in several configurations: give "
            f"one of {', '.join(f'{base}/{c}' for c in configs)}."
        )
    if configs:
        folder = folder / configs[0]
    pattern = re.escape(version or "*.*.*").replace(r"\*", r"\d+")
    versions = [v for v in _versions(folder) if re.fullmatch(pattern, v)]
    if not versions:
        raise _not_found(name, root, source)
    return folder / versions[-1]


def _not_found(name, root, source):
    there = _on_disk(root)
    base = name.split(":")[0].split("/")[0]
    if base in there:
        forms = _versions(root / base) or _configs(root / base)
        state = f"which holds {base} only as {', '.join(forms)}"
    elif there:
        state = f"which holds {', '.join(there)}"
    else:
        state = (
            "which holds no prepared set" if root.is_dir() else "which is not a folder"
        )
    known = sorted({"digits", *there, *_COMMON})
    near = [] if base in known else difflib.get_close_matches(base, known, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    wanted = near[0] if near and near != ["digits"] else name
    return DatasetNotFoundError(
        f"data set {name!r} not found: looked in {root} (from {source}), {state}."
        f"{hint} There are three ways to get it: pass --data-dir (in Python data_dir=) "
        "the folder that holds prepared sets; or set the environment variable "
        f"TFDS_DATA_DIR to that folder; or {_prepare(wanted.split(':')[0])}. "
        "The set 'digits' needs no files."
    )


def _prepare(name):
    return (
        "prepare it once, with a network and with TensorFlow installed (reading needs "
        f"neither), by `tfds build {name} --file_format=array_record` or `python -c "
        f"\"import tensorflow_datasets as tfds; tfds.builder('{name}')."
        "download_and_prepare(file_format='array_record')\"`"
    )


def _not_installed(name, package):
    return ImportError(
        f"data set {name!r} needs the package {package}, which is not installed: "
        "pip install 'jaxfed[train]'."
    )


# Decoding.


@contextlib.contextmanager
def _quiet():
    """Hide the remarks of tensorflow-datasets about optional packages."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import tensorflow_datasets  # noqa: F401, it replaces the logger below

        logger = logging.getLogger("absl")
        level = logger.level
        logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            logger.setLevel(level)


def _decode(folder, name, limits):
    if not any(".array_record" in p.name for p in folder.iterdir()):
        info = json.loads((folder / "dataset_info.json").read_text())
        raise DatasetNotFoundError(
            f"data set {name!r} in {folder} is stored as "
            f"{info.get('fileFormat', 'tfrecord')}, which only TensorFlow reads (or "
            f"its files are gone): {_prepare(name)}."
        )
    try:
        with _quiet():
            return _decode_splits(folder, name, limits)
    except ImportError as error:
        raise _not_installed(name, f"{error.name or 'of this error'}") from error


def _decode_splits(folder, name, limits):
    import tensorflow_datasets as tfds

    with _readable(name, folder):
        builder = tfds.builder_from_directory(folder, file_format="array_record")
        info = builder.info
    image_key, label_key = info.supervised_keys or ("image", "label")
    features = dict(getattr(info.features, "items", dict)())
    label_feature = features.get(label_key)
    if not (
        isinstance(features.get(image_key), tfds.features.Image)
        and label_feature is not None
        and label_feature.shape == ()
        and np.issubdtype(label_feature.np_dtype, np.integer)
    ):
        raise ValueError(
            f"data set {name!r} is not one of images with one class label each: its "
            f"features are {', '.join(sorted(features))}. Give the name of an "
            "image-classification set."
        )
    arrays = {}
    test = "test" if "test" in info.splits else "validation"
    for ours, theirs in (("train", "train"), ("test", test)):
        if theirs not in info.splits:
            raise ValueError(
                f"data set {name!r} has no split {theirs!r}, only "
                f"{', '.join(info.splits)}: it must have train, and test or validation."
            )
        with _readable(name, folder):
            source = builder.as_data_source(split=theirs)
            image, label = _read_split(source, image_key, label_key, limits[ours])
        if len(label) == 0 or label.min() < 0:
            raise ValueError(
                f"split {theirs!r} of data set {name!r} has no (or hidden) labels: it "
                "cannot be used for training or testing."
            )
        arrays[f"{ours}_image"], arrays[f"{ours}_label"] = image, label
    known = getattr(label_feature, "num_classes", None)
    largest = max(arrays["train_label"].max(), arrays["test_label"].max())
    arrays["num_classes"] = np.int64(known or largest + 1)
    return arrays


@contextlib.contextmanager
def _readable(name, folder):
    """Turn whatever the reading libraries raise into one sentence about the files."""
    try:
        yield
    except ImportError:
        raise
    except Exception as error:
        raise ValueError(
            f"data set {name!r} in {folder} cannot be read ({error}): delete that "
            f"folder and {_prepare(name)}."
        ) from error


def _read_split(source, image_key, label_key, limit):
    total = len(source) if limit is None else min(limit, len(source))
    image, label = None, np.empty(total, np.int32)
    for start in range(0, total, _CHUNK):
        stop = min(start + _CHUNK, total)
        examples = source.__getitems__(range(start, stop))
        for i, example in zip(range(start, stop), examples, strict=True):
            pixels = np.asarray(example[image_key])
            if image is None:
                image = np.empty((total, *pixels.shape), pixels.dtype)
            if pixels.shape != image.shape[1:]:
                raise ValueError(
                    f"images differ in shape, {image.shape[1:]} and {pixels.shape}; "
                    "only sets of equal images are supported"
                )
            image[i], label[i] = pixels, example[label_key]
    if image is not None and image.dtype != np.uint8:
        # Deeper integers would not survive the 1/255 of the models.
        deep = np.issubdtype(image.dtype, np.integer)
        scale = np.iinfo(image.dtype).max if deep else 1
        image = (image / scale).astype(np.float32)
    return image, label


# The cache: one .npz file a set, whose checksums tell a damaged file from a good one.


def _cache_file(folder, name, cache_dir):
    if cache_dir is None:
        cache_dir = os.environ.get("JAXFED_CACHE_DIR")
    if not cache_dir:
        cache_dir = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "jaxfed"
    source = [str(folder.resolve()), _CACHE_FORMAT]
    for path in sorted(folder.iterdir()):
        stat = path.stat()
        source.append((path.name, stat.st_size, stat.st_mtime_ns))
    fingerprint = hashlib.sha256(repr(source).encode()).hexdigest()[:16]
    stem = name.split(":")[0].replace("/", "-")
    file = f"{stem}-{folder.name}-{fingerprint}.npz"
    return Path(cache_dir).expanduser() / file


def _read_cache(path):
    """Return the cached arrays, or None if there are none or they are damaged."""
    wanted = {"num_classes"}
    wanted |= {f"{s}_{k}" for s in ("train", "test") for k in ("image", "label")}
    try:
        with open(path, "rb") as opened, np.load(opened, allow_pickle=False) as file:
            arrays = {key: file[key] for key in file.files}
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error):
        arrays = {}
    if set(arrays) != wanted:
        logging.getLogger(__name__).info("rebuilding the damaged cache file %s", path)
        return None
    return arrays


def _write_cache(path, arrays):
    """Write beside the target and rename, so that readers never see half a file."""
    part = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            dir=path.parent, prefix=f".{path.stem}-", suffix=".part", delete=False
        ) as file:
            part = file.name
            np.savez(file, **arrays)
        os.replace(part, path)
    except OSError as error:
        # A full or read-only disk costs time at the next load, not this result.
        logging.getLogger(__name__).warning("cannot cache %s: %s", path.name, error)
    finally:
        if part is not None:
            with contextlib.suppress(OSError):
                os.unlink(part)
