# SPDX-License-Identifier: Apache-2.0
import io
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxfed import data
from jaxfed.data import datasets

# Splits.


def covers(parts, total):
    return np.array_equal(np.sort(np.concatenate(parts)), np.arange(total))


SPLITS = {
    "iid": {},
    "dirichlet": {"beta": 0.5},
    "by_classes": {"classes_per_client": 3},
}
LABELS = np.random.default_rng(0).integers(0, 10, 1000)


@pytest.mark.parametrize("kind", SPLITS)
def test_split_is_a_deterministic_partition(kind):
    parts = data.split(LABELS, 25, kind=kind, seed=3, **SPLITS[kind])
    again = data.split(LABELS.copy(), 25, kind=kind, seed=3, **SPLITS[kind])
    other = data.split(LABELS, 25, kind=kind, seed=4, **SPLITS[kind])
    assert len(parts) == 25
    assert covers(parts, 1000)
    assert all(p.dtype == np.int64 and len(p) > 0 for p in parts)
    assert all(np.array_equal(a, b) for a, b in zip(parts, again, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(parts, other, strict=True))
    direct = getattr(data, kind)(LABELS, 25, seed=3, **SPLITS[kind])
    assert all(np.array_equal(a, b) for a, b in zip(parts, direct, strict=True))


@pytest.mark.parametrize("kind", SPLITS)
def test_split_depends_on_no_global_state(kind):
    first = data.split(LABELS, 5, kind=kind, seed=0, **SPLITS[kind])
    before = np.random.get_state()[1].copy()  # noqa: NPY002, the state to be left alone
    second = data.split(LABELS, 5, kind=kind, seed=0, **SPLITS[kind])
    assert np.array_equal(before, np.random.get_state()[1])  # noqa: NPY002
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("kind", SPLITS)
def test_split_does_not_care_how_classes_are_numbered(kind):
    names = np.array([-7, 3, 12, 13, 14, 50, 99, 100, 1000, 10**9])
    plain = data.split(LABELS, 8, kind=kind, seed=1, **SPLITS[kind])
    named = data.split(names[LABELS], 8, kind=kind, seed=1, **SPLITS[kind])
    assert all(np.array_equal(a, b) for a, b in zip(plain, named, strict=True))


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 60), st.integers(1, 60), st.integers(0, 2**32))
def test_iid_sizes_differ_by_one(total, clients, seed):
    labels = np.zeros(total, int)
    if clients > total:
        with pytest.raises(ValueError, match="num_clients must be at most"):
            data.iid(labels, clients, seed=seed)
        return
    parts = data.iid(labels, clients, seed=seed)
    assert covers(parts, total)
    assert {len(p) for p in parts} <= {total // clients, -(-total // clients)}


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 12),
    st.integers(1, 8),
    st.integers(1, 8),
    st.integers(0, 2**32),
)
def test_by_classes_gives_exactly_k_classes(clients, classes, k, seed):
    labels = np.random.default_rng(seed).permutation(np.arange(classes * 20) % classes)
    if k > classes:
        with pytest.raises(ValueError, match="at most the number of classes"):
            data.by_classes(labels, clients, classes_per_client=k, seed=seed)
        return
    if clients * k < classes:
        with pytest.raises(ValueError, match="would be left out"):
            data.by_classes(labels, clients, classes_per_client=k, seed=seed)
        return
    parts = data.by_classes(labels, clients, classes_per_client=k, seed=seed)
    assert covers(parts, labels.size)
    held = [set(labels[p].tolist()) for p in parts]
    assert all(len(h) == k for h in held)
    holders = [sum(c in h for h in held) for c in range(classes)]
    assert min(holders) >= 1
    assert max(holders) - min(holders) <= 1


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 10),
    st.sampled_from([0.01, 0.1, 0.5, 1.0, 100.0]),
    st.integers(0, 3),
    st.integers(0, 2**32),
)
def test_dirichlet_covers(clients, beta, min_size, seed):
    labels = np.random.default_rng(seed).integers(0, 4, 100)
    try:
        parts = data.dirichlet(
            labels, clients, beta=beta, seed=seed, min_size=min_size, max_tries=20
        )
    except ValueError as error:
        assert "no Dirichlet split" in str(error)
        assert beta <= 0.1
        return
    assert covers(parts, 100)
    assert min(len(p) for p in parts) >= min_size


def mean_label_entropy(labels, parts):
    result = 0.0
    for part in parts:
        p = np.bincount(labels[part], minlength=10) / len(part)
        result -= np.sum(p[p > 0] * np.log(p[p > 0])) / len(parts)
    return result


def test_dirichlet_heterogeneity_row_19():
    # DRAG sheet, row 19: beta = 100 is near uniform, and smaller means less entropy.
    labels = np.arange(20_000) % 10
    entropy = {}
    for beta in (0.1, 0.5, 100.0):
        parts = data.dirichlet(labels, 40, beta=beta, seed=0, min_size=10)
        assert covers(parts, 20_000)
        assert min(len(p) for p in parts) >= 10
        entropy[beta] = mean_label_entropy(labels, parts)
    assert entropy[0.1] < entropy[0.5] < entropy[100.0]
    assert entropy[100.0] > 0.99 * np.log(10)


def test_dirichlet_shares_have_the_right_distribution():
    # With two clients and beta = 2 a class's share is Beta(2, 2): mean 1/2, variance
    # beta^2 / ((2 beta)^2 (2 beta + 1)) = 1/20.
    labels = np.arange(4000) % 20
    shares = []
    for seed in range(60):
        parts = data.dirichlet(labels, 2, beta=2.0, seed=seed)
        shares.append(np.bincount(labels[parts[0]], minlength=20) / 200)
    shares = np.concatenate(shares)
    assert abs(shares.mean() - 0.5) < 0.02
    assert abs(shares.var() - 0.05) < 0.006


def test_splits_are_not_in_class_order():
    labels = np.repeat(np.arange(10), 100)
    for kind in SPLITS:
        part = data.split(labels, 4, kind=kind, seed=0, **SPLITS[kind])[0]
        assert np.any(np.diff(labels[part]) < 0)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"kind": "iidd"}, "unknown split 'iidd'.*Did you mean 'iid'.*dirichlet"),
        ({"kind": "dirichlet"}, "'dirichlet' needs beta="),
        ({"kind": "dirichlet", "beta": 0.0}, "beta must be a finite number > 0"),
        ({"kind": "dirichlet", "betta": 1.0}, "Did you mean 'beta'"),
        ({"kind": "iid", "beta": 1.0}, "unknown option of 'iid'"),
        ({"kind": "dirichlet(beta=1)", "beta": 2.0}, "beta is given twice"),
        ({"kind": "iid+iid"}, "one split"),
        ({"kind": "dirichlet", "beta": 1.0, "min_size": 500}, "needs 12500 examples"),
        (
            {"kind": "dirichlet", "beta": 1e-3, "min_size": 20, "max_tries": 3},
            "min_size=20 examples in 3 draws.*Raise beta",
        ),
        ({"kind": "by_classes", "classes_per_client": 11}, "for 10 classes"),
        ({"kind": "by_classes", "classes_per_client": 0}, "at least 1"),
        ({"kind": "iid", "seed": -1}, "seed must be at least 0"),
        ({"kind": "iid", "num_clients": 0}, "num_clients must be at least 1"),
        ({"kind": "iid", "labels": np.zeros((2, 2), int)}, "non-empty vector"),
        ({"kind": "iid", "labels": []}, "non-empty vector"),
    ],
)
def test_split_errors(kwargs, message):
    kwargs = {"labels": LABELS, "num_clients": 25, "seed": 0} | kwargs
    with pytest.raises(ValueError, match=message):
        data.split(**kwargs)


def test_split_wrong_kinds():
    with pytest.raises(TypeError, match="labels must be integers"):
        data.iid(np.zeros(4), 2, seed=0)
    with pytest.raises(TypeError, match="num_clients must be a Python int"):
        data.iid(LABELS, 2.0, seed=0)
    with pytest.raises(TypeError, match="spec must be a string"):
        data.split(LABELS, 2, kind=None, seed=0)


def test_split_written_options_and_unset_ones():
    written = data.split(LABELS, 4, kind="dirichlet(beta=0.5)", seed=0)
    given_ = data.split(LABELS, 4, kind="dirichlet", beta=0.5, min_size=None, seed=0)
    assert all(np.array_equal(a, b) for a, b in zip(written, given_, strict=True))


def test_by_classes_needs_enough_examples_of_each():
    with pytest.raises(ValueError, match="class 1 has 1 examples, too few for the 4"):
        data.by_classes([0, 0, 0, 0, 0, 1], 4, classes_per_client=2, seed=0)


def test_dirichlet_survives_a_tiny_beta():
    parts = data.dirichlet(LABELS, 3, beta=1e-300, seed=0, min_size=0)
    assert covers(parts, 1000)


# Stacking.


def test_stack_pads_with_zeros_and_counts():
    x = {
        "image": np.arange(24, dtype=np.uint8).reshape(6, 2, 2) + 1,
        "label": LABELS[:6],
    }
    shard = data.stack(x, [[5, 0, 2], [], np.array([1])])
    assert shard.count.tolist() == [3, 0, 1]
    assert shard.count.dtype == np.int32
    assert shard.data["image"].shape == (3, 3, 2, 2)
    assert shard.data["image"].dtype == np.uint8
    for row, part in enumerate([[5, 0, 2], [], [1]]):
        for key in x:
            got = np.asarray(shard.data[key][row])
            assert np.array_equal(got[: len(part)], x[key][np.array(part, int)])
            assert not got[len(part) :].any()


def test_stack_capacity():
    x = np.arange(5.0, dtype=np.float32)
    assert data.stack(x, [[0, 1], [2]], capacity=4).data.shape == (2, 4)
    assert data.stack(x, [[], []]).data.shape == (2, 1)
    with pytest.raises(ValueError, match="capacity=1, client 1 has 2 examples"):
        data.stack(x, [[0], [1, 2]], capacity=1)


@pytest.mark.parametrize("kind", SPLITS)
def test_stack_loses_nothing(kind):
    parts = data.split(LABELS, 20, kind=kind, seed=0, **SPLITS[kind])
    shard = data.stack({"index": np.arange(1000)}, parts)
    rows, counts = np.asarray(shard.data["index"]), np.asarray(shard.count)
    assert covers([r[:c] for r, c in zip(rows, counts, strict=True)], 1000)


@pytest.mark.parametrize(
    ("tree", "parts", "error", "message"),
    [
        (np.zeros(3), [], ValueError, "at least one client"),
        ({"a": np.zeros(3), "b": np.zeros(4)}, [[0]], ValueError, "same leading axis"),
        (np.float32(1), [[0]], ValueError, "same leading axis"),
        ({}, [[0]], ValueError, "same leading axis"),
        (np.zeros(3), [[0], [3]], ValueError, r"parts\[1\] must index 3 examples"),
        (np.zeros(3), [[-1]], ValueError, "from -1 to -1"),
        (np.zeros(3), [[0.0]], TypeError, r"parts\[0\] must be a vector of integer"),
        (np.zeros(3), [[True, False, True]], TypeError, "got bool"),
    ],
)
def test_stack_errors(tree, parts, error, message):
    with pytest.raises(error, match=message):
        data.stack(tree, parts)


# Digits.


def test_digits():
    digits = data.load("digits")
    assert digits.name == "digits"
    assert digits.num_classes == 10
    assert digits.train["image"].shape == (1438, 8, 8, 1)
    assert digits.test["image"].shape == (359, 8, 8, 1)
    for part in (digits.train, digits.test):
        assert part["image"].dtype == np.float32
        assert part["label"].dtype == np.int32
        assert part["image"].min() == 0
        assert part["image"].max() == 1
        # Stratified, and shuffled.
        share = np.bincount(part["label"]) / len(part["label"])
        assert np.all(np.abs(share - 0.1) < 0.005)
        assert np.any(np.diff(part["label"]) < 0)
    # Together they are scikit-learn's set, each example once.
    from sklearn.datasets import load_digits

    def rows(image, label):
        flat = np.column_stack([image.reshape(len(label), -1) * 16, label])
        return flat[np.lexsort(flat.T)]

    both = [np.concatenate([digits.train[k], digits.test[k]]) for k in digits.train]
    assert np.array_equal(
        rows(*both), rows(load_digits().images / 16, load_digits().target)
    )


def test_digits_split_is_fixed():
    digits = data.load("digits", max_train=6, max_test=6)
    assert digits.train["image"].shape == (6, 8, 8, 1)
    assert digits.train["label"].tolist() == [4, 2, 1, 4, 5, 3]
    assert digits.test["label"].tolist() == [9, 3, 7, 1, 6, 9]


# Sets in the format of tensorflow-datasets, written here byte by byte.


def write_set(root, name="tiny", version="1.0.0", splits=None, **changes):
    """Write a set of 5x4 images as tensorflow-datasets would; return its arrays."""
    from array_record.python.array_record_module import ArrayRecordWriter
    from PIL import Image
    from tensorflow_datasets.proto import tf_example_pb2

    splits = {"train": 30, "test": 9} if splits is None else splits
    keys = changes.get("keys", ("image", "label"))
    folder = Path(root) / name / version
    folder.mkdir(parents=True)
    rng = np.random.default_rng(len(name))
    arrays, infos = {}, []
    for split, total in splits.items():
        file = f"{name.split('/')[0]}-{split}.array_record-00000-of-00001"
        writer = ArrayRecordWriter(str(folder / file), "group_size:1")
        images = rng.integers(0, 256, (total, 5, 4, 1), dtype=np.uint8)
        labels = changes.get("labels", rng.integers(0, 3, total, dtype=np.int32))
        for i in range(total):
            png = io.BytesIO()
            crop = (
                images[i, : 5 - i, :, 0] if changes.get("ragged") else images[i, ..., 0]
            )
            Image.fromarray(crop).save(png, format="PNG")
            example = tf_example_pb2.Example()
            feature = example.features.feature
            feature[keys[0]].bytes_list.value.append(png.getvalue())
            feature[keys[1]].int64_list.value.append(int(labels[i]))
            writer.write(example.SerializeToString())
        writer.close()
        arrays[split] = {"image": images, "label": labels}
        infos.append(
            {
                "name": split,
                "shardLengths": [str(total)],
                "numBytes": "1",
                "filepathTemplate": "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}",
            }
        )
    info = {
        "fileFormat": "array_record",
        "name": name.split("/")[0],
        "version": version,
        "splits": infos,
        "supervisedKeys": {
            "tuple": {"items": [{"featureKey": key} for key in keys]},
        },
    }
    if changes.get("unsupervised"):
        del info["supervisedKeys"]
    (folder / "dataset_info.json").write_text(json.dumps(info))
    dims = ["-1", "-1", "1"] if changes.get("ragged") else ["5", "4", "1"]
    package = "tensorflow_datasets.core.features."
    features = {
        keys[0]: {
            "pythonClassName": package + "image_feature.Image",
            "image": {"dtype": "uint8", "shape": {"dimensions": dims}},
        },
        keys[1]: {
            "pythonClassName": package + "class_label_feature.ClassLabel",
            "classLabel": {"numClasses": "4"},
        },
    }
    if changes.get("text"):
        features[keys[1]] = {
            "pythonClassName": package + "text_feature.Text",
            "text": {},
        }
    (folder / "features.json").write_text(
        json.dumps(
            {
                "pythonClassName": package + "features_dict.FeaturesDict",
                "featuresDict": {"features": features},
            }
        )
    )
    return arrays


def same(part, expected):
    return all(np.array_equal(part[k], expected[k]) for k in ("image", "label"))


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """A data folder and a cache folder, with none of the user's settings."""
    for name in ("TFDS_DATA_DIR", "JAXFED_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("USERPROFILE", str(tmp_path / "home"))
    return tmp_path / "sets", tmp_path / "cache"


def no_decoding(*args):
    raise AssertionError("decoded although a cached copy should do")


def test_tfds_set_is_decoded_then_cached(folders, monkeypatch):
    sets, cache = folders
    arrays = write_set(sets)
    first = data.load("tiny", sets, cache)
    assert first.num_classes == 4  # from the metadata, not from the labels present
    assert first.train["image"].dtype == np.uint8
    assert first.train["label"].dtype == np.int32
    assert same(first.train, arrays["train"])
    assert same(first.test, arrays["test"])
    (file,) = cache.iterdir()
    assert file.name.startswith("tiny-1.0.0-")
    monkeypatch.setattr(datasets, "_decode", no_decoding)
    again = data.load("tiny", str(sets), str(cache), max_train=7, max_test=2)
    assert again.num_classes == 4
    assert same(again.train, {k: v[:7] for k, v in arrays["train"].items()})
    assert same(again.test, {k: v[:2] for k, v in arrays["test"].items()})


def test_reading_needs_no_tensorflow_and_the_cache_no_tfds(folders):
    sets, cache = folders
    write_set(sets)
    program = (
        "import sys; from jaxfed.data import load; load('tiny', *sys.argv[1:]); "
        "print([m in sys.modules for m in ('tensorflow', 'tensorflow_datasets')])"
    )

    def run():
        command = [sys.executable, "-W", "error", "-c", program, str(sets), str(cache)]
        return subprocess.run(command, capture_output=True, text=True, check=True)

    first, second = run(), run()
    assert (first.stdout, first.stderr) == ("[False, True]\n", "")
    assert (second.stdout, second.stderr) == ("[False, False]\n", "")


def test_limits_without_a_cached_copy_decode_only_a_prefix(folders):
    sets, cache = folders
    arrays = write_set(sets)
    part = data.load("tiny", sets, cache, max_train=4)
    assert same(part.train, {k: v[:4] for k, v in arrays["train"].items()})
    assert same(part.test, arrays["test"])
    assert not cache.exists()
    with pytest.raises(ValueError, match="max_train must be at least 1"):
        data.load("tiny", sets, cache, max_train=0)


def damage_cut(content):
    return content[: len(content) // 2]


def damage_flip(content):
    middle = content.index(b"NUMPY") + 300
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


def damage_pickle(content):
    file = io.BytesIO()
    np.savez(file, train_image=np.array([{}], dtype=object))
    return file.getvalue()


@pytest.mark.parametrize(
    "damage",
    [damage_cut, damage_flip, damage_pickle, lambda c: b"", lambda c: b"garbage"],
)
def test_damaged_cache_is_rebuilt(folders, damage):
    sets, cache = folders
    arrays = write_set(sets)
    data.load("tiny", sets, cache)
    (file,) = cache.iterdir()
    good = file.read_bytes()
    file.write_bytes(damage(good))
    assert datasets._read_cache(file) is None
    assert same(data.load("tiny", sets, cache).train, arrays["train"])
    assert file.read_bytes() == good
    assert list(cache.iterdir()) == [file]


def test_cache_notices_a_changed_source(folders):
    sets, cache = folders
    write_set(sets)
    data.load("tiny", sets, cache)
    (file,) = (sets / "tiny" / "1.0.0").glob("*train*")
    os.utime(file, ns=(1, 1))
    data.load("tiny", sets, cache)
    assert len(list(cache.iterdir())) == 2


def test_two_writers_and_a_reader_of_the_cache(tmp_path):
    path = tmp_path / "set.npz"
    arrays = {"num_classes": np.int64(3)}
    for split in ("train", "test"):
        arrays[f"{split}_image"] = np.ones((200, 20, 20, 1), np.uint8)
        arrays[f"{split}_label"] = np.ones(200, np.int32)
    datasets._write_cache(path, arrays)
    stop = threading.Event()

    def write():
        while not stop.is_set():
            datasets._write_cache(path, arrays)

    writers = [threading.Thread(target=write) for _ in range(2)]
    for writer in writers:
        writer.start()
    try:
        for _ in range(50):
            assert set(datasets._read_cache(path)) == set(arrays)
    finally:
        stop.set()
        for writer in writers:
            writer.join()
    assert list(tmp_path.iterdir()) == [path]


def test_two_processes_fill_the_cache_at_once(folders):
    sets, cache = folders
    write_set(sets)
    program = "import sys; from jaxfed.data import load; load('tiny', *sys.argv[1:])"
    command = [sys.executable, "-c", program, str(sets), str(cache)]
    processes = [subprocess.Popen(command) for _ in range(2)]
    assert [p.wait() for p in processes] == [0, 0]
    (file,) = cache.iterdir()
    assert datasets._read_cache(file) is not None


def test_interrupted_write_leaves_nothing(tmp_path, monkeypatch):
    def interrupted(file, **arrays):
        file.write(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(np, "savez", interrupted)
    with pytest.raises(KeyboardInterrupt):
        datasets._write_cache(tmp_path / "set.npz", {})
    assert not list(tmp_path.iterdir())


def test_unwritable_cache_is_only_logged(folders, caplog):
    sets, cache = folders
    arrays = write_set(sets)
    cache.write_text("a file where the folder should be")
    assert same(data.load("tiny", sets, cache).train, arrays["train"])
    assert "cannot cache tiny-1.0.0" in caplog.text


def test_folders_from_the_environment(folders, monkeypatch, tmp_path):
    sets, cache = folders
    arrays = write_set(sets)
    home = tmp_path / "home"
    monkeypatch.setenv("TFDS_DATA_DIR", str(sets))
    assert same(data.load("tiny").train, arrays["train"])
    assert len(list((home / ".cache" / "jaxfed").iterdir())) == 1
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    data.load("tiny")
    assert len(list((tmp_path / "xdg" / "jaxfed").iterdir())) == 1
    monkeypatch.setenv("JAXFED_CACHE_DIR", str(cache))
    data.load("tiny")
    assert len(list(cache.iterdir())) == 1
    other = write_set(tmp_path / "other", splits={"train": 5, "test": 4})
    assert same(data.load("tiny", tmp_path / "other").train, other["train"])
    monkeypatch.delenv("TFDS_DATA_DIR")
    at_home = write_set(home / "tensorflow_datasets", splits={"train": 6, "test": 4})
    assert same(data.load("tiny").train, at_home["train"])


def test_versions_and_configurations(folders):
    sets, cache = folders
    sizes = {"1.2.0": 11, "1.10.0": 12, "2.0.0": 13}
    for version, total in sizes.items():
        write_set(sets, version=version, splits={"train": total, "test": 4})
    for name, total in {
        "tiny": 13,
        "tiny:1.2.0": 11,
        "tiny:1.*.*": 12,
    }.items():
        assert len(data.load(name, sets, cache).train["label"]) == total
    one = write_set(sets, "letters/upper")
    assert same(data.load("letters", sets, cache).train, one["train"])
    two = write_set(sets, "letters/lower_case")
    assert same(data.load("letters/lower_case", sets, cache).train, two["train"])
    assert same(data.load("letters/upper:1.0.0", sets, cache).train, one["train"])
    with pytest.raises(
        data.DatasetNotFoundError, match="letters/lower_case, letters/upper"
    ):
        data.load("letters", sets, cache)


def test_validation_stands_in_for_test_and_keys_are_taken_from_the_set(folders):
    sets, cache = folders
    splits = {"train": 8, "validation": 4}
    arrays = write_set(sets, keys=("picture", "kind"), splits=splits)
    assert same(data.load("tiny", sets, cache).test, arrays["validation"])
    arrays = write_set(sets, "plain", unsupervised=True)
    assert same(data.load("plain", sets, cache).test, arrays["test"])


def test_missing_set_says_where_and_how(folders, monkeypatch, tmp_path):
    sets, cache = folders
    write_set(sets)
    with pytest.raises(data.DatasetNotFoundError) as error:
        data.load("mnits", sets, cache)
    text = str(error.value)
    assert "\n" not in text
    for part in (
        "'mnits' not found",
        f"looked in {sets} (from data_dir), which holds tiny",
        "Did you mean 'mnist'?",
        "--data-dir",
        "TFDS_DATA_DIR",
        "tfds build mnist",
        "download_and_prepare(file_format='array_record')",
    ):
        assert part in text
    for name, part in {
        "tinny": "Did you mean 'tiny'?",
        "tiny:3.0.0": "holds tiny only as 1.0.0",
        "tiny/large": "holds tiny only as 1.0.0",
        "digit": "Did you mean 'digits'?",
        "../sets/tiny": "not found",
        "": "not found",
    }.items():
        with pytest.raises(ValueError, match="not found") as error:
            data.load(name, sets, cache)
        assert part in str(error.value)
    with pytest.raises(data.DatasetNotFoundError, match="default.*not a folder"):
        data.load("mnist")
    (tmp_path / "empty").mkdir()
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "empty"))
    with pytest.raises(
        data.DatasetNotFoundError, match=r"\(from TFDS_DATA_DIR\).*no prepared set"
    ):
        data.load("mnist")
    with pytest.raises(TypeError, match="name must be a string"):
        data.load(None)


def test_set_in_another_file_format(folders):
    sets, cache = folders
    write_set(sets)
    for file in (sets / "tiny" / "1.0.0").glob("*.array_record*"):
        file.rename(str(file).replace("array_record", "tfrecord"))
    with pytest.raises(data.DatasetNotFoundError, match="which only TensorFlow reads"):
        data.load("tiny", sets, cache)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"splits": {"train": 8}}, "no split 'validation', only train"),
        ({"text": True}, "not one of images with one class label.*image, label"),
        ({"ragged": True, "splits": {"train": 2, "test": 2}}, "images differ in shape"),
        ({"labels": -np.ones(30, int)}, "no \\(or hidden\\) labels"),
    ],
)
def test_unsuitable_sets(folders, changes, message):
    sets, cache = folders
    write_set(sets, **changes)
    with pytest.raises(ValueError, match=message):
        data.load("tiny", sets, cache)
    assert not cache.exists()


@pytest.mark.parametrize("pattern", ["*train*", "dataset_info.json", "features.json"])
def test_damaged_source(folders, pattern):
    sets, cache = folders
    write_set(sets)
    (file,) = (sets / "tiny" / "1.0.0").glob(pattern)
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(ValueError, match="cannot be read .*delete that folder"):
        data.load("tiny", sets, cache)
    assert not cache.exists()


# Real sets, where they are.

REAL = Path(
    os.environ.get("JAXFED_TEST_DATA")
    or Path(__file__).resolve().parents[1] / ".." / "shared" / "data" / "tfds"
)
needs_real = pytest.mark.skipif(
    not REAL.is_dir(),
    reason="no prepared sets: set JAXFED_TEST_DATA to a folder of tensorflow-datasets",
)


@needs_real
@pytest.mark.parametrize(
    ("name", "shape"),
    [("mnist", (28, 28, 1)), ("fashion_mnist", (28, 28, 1)), ("cifar10", (32, 32, 3))],
)
def test_real_sets(name, shape, tmp_path):
    if not (REAL / name).is_dir():
        pytest.skip(f"{name} is not prepared in JAXFED_TEST_DATA")
    part = data.load(name, REAL, tmp_path, max_train=300, max_test=200)
    assert part.num_classes == 10
    assert part.train["image"].shape == (300, *shape)
    assert part.test["image"].shape == (200, *shape)
    assert part.train["image"].dtype == np.uint8
    assert part.train["image"].max() > 200
    assert set(part.train["label"].tolist()) == set(range(10))


@needs_real
@pytest.mark.slow
def test_the_whole_of_mnist(tmp_path):
    if not (REAL / "mnist").is_dir():
        pytest.skip("mnist is not prepared in JAXFED_TEST_DATA")
    mnist = data.load("mnist", REAL, tmp_path)
    # The class counts published with the set.
    train = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    test = [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    assert np.bincount(mnist.train["label"]).tolist() == train
    assert np.bincount(mnist.test["label"]).tolist() == test
    # And its mean and deviation of training pixels, 0.1307 and 0.3081.
    pixels = mnist.train["image"].astype(np.float32) / 255
    assert pixels.mean() == pytest.approx(0.1307, abs=5e-5)
    assert pixels.std() == pytest.approx(0.3081, abs=5e-5)
