"""IDX files of every type, whole and broken; datasets; loaders' orders."""

import gzip
import struct

import numpy as np
import pytest
from against_torch import on

import mytorch
from mytorch import Tensor, data
from mytorch.data.idx import TYPES


@pytest.fixture(autouse=True)
def serial():
    with on("serial"):
        yield


def idx(array, code):
    return (
        bytes([0, 0, code, array.ndim])
        + struct.pack(f">{array.ndim}I", *array.shape)
        + array.astype(TYPES[code]).tobytes()
    )


@pytest.mark.parametrize("code", TYPES)
@pytest.mark.parametrize("shape", [(5,), (2, 3), (3, 2, 4), (0, 4)])
@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_idx_of_every_type(tmp_path, code, shape, pack):
    array = np.arange(np.prod(shape)).reshape(shape).astype(np.dtype(TYPES[code]).newbyteorder("=")) - (
        0 if code == 8 else 3
    )
    # The name says nothing about compression, the content does.
    (tmp_path / "file").write_bytes(pack(idx(array, code)))
    found = data.load_idx(tmp_path / "file")
    assert found.dtype == array.dtype
    assert found.dtype.isnative
    assert found.shape == shape
    assert (found == array).all()
    found[...] = 1  # It shares no memory with anything else.


def test_idx_as_the_format_defines_it(tmp_path):
    """Written byte by byte: 2 images of 1 × 3."""
    (tmp_path / "file").write_bytes(bytes.fromhex("00000803 00000002 00000001 00000003 01ff03 040506".replace(" ", "")))
    assert data.load_idx(str(tmp_path / "file")).tolist() == [[[1, 255, 3]], [[4, 5, 6]]]


WHOLE = idx(np.arange(6).reshape(2, 3), 0x0C)
# The time would stand in it, and in the name of a test.
PACKED = gzip.compress(WHOLE, mtime=0)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is no IDX file: it must begin with 00 00 and a type among 08, 09, 0b, 0c, 0d, 0e, and begins with ''"),
        (
            b"\x89PNG1234",
            (
                "is no IDX file: it must begin with 00 00 and a type among 08, 09, 0b, 0c, 0d, 0e, and begins with '89"
                " 50 4e 47'"
            ),
        ),
        (b"\0\0\x0a\x01", "is no IDX file"),
        (WHOLE[:9], "is truncated: 2 axes take a header of 12 bytes, and the file has 9: download it again"),
        (
            WHOLE[:-1],
            "is truncated: shape [2, 3] of 4-byte elements takes 36 bytes, and the file has 35: download it again",
        ),
        (WHOLE + b"\0", "is too long: shape [2, 3] of 4-byte elements takes 36 bytes, and the file has 37"),
        (
            b"\0\0\x08\x04" + b"\xff" * 16,
            "is truncated: shape [4294967295, 4294967295, 4294967295, 4294967295] of 1-byte elements takes",
        ),
        (PACKED[:-4], "is a truncated or damaged gzip file"),
        (PACKED[:15] + b"\xff\xff" + PACKED[17:], "is a truncated or damaged gzip file"),
        (gzip.compress(WHOLE[:-1], mtime=0), "is truncated: shape [2, 3]"),
    ],
)
def test_broken_files(tmp_path, content, said):
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(ValueError) as error:  # noqa: PT011
        data.load_idx(tmp_path / "file")
    assert str(error.value).startswith(str(tmp_path / "file"))
    assert said in str(error.value)


def test_a_missing_file(tmp_path):
    for path in (tmp_path / "nothing", tmp_path):
        with pytest.raises(FileNotFoundError, match=f"there is no IDX file {path}: check the path"):
            data.load_idx(path)


def numbers(loader):
    return [batch[0].numpy().tolist() for batch in loader]


def test_batches_in_order():
    images, classes = np.arange(24, dtype="float32").reshape(8, 3), np.arange(8, dtype="uint8")
    loader = data.DataLoader(data.ArrayDataset(classes, images), 3)
    assert len(loader) == 3
    first, second, third = loader
    assert first[0].dtype == mytorch.int64
    assert first[1].dtype == mytorch.float32
    assert (second[1].numpy() == images[3:6]).all()
    assert third[0].numpy().tolist() == [6, 7]
    dropping = data.DataLoader(data.ArrayDataset(classes), 3, drop_last=True)
    assert len(dropping) == 2
    assert numbers(dropping) == [[0, 1, 2], [3, 4, 5]]
    assert numbers(data.DataLoader(data.ArrayDataset(classes), 8)) == [list(range(8))]
    assert numbers(data.DataLoader(data.ArrayDataset(np.zeros((0, 2))), 8)) == []


def test_shuffling():
    dataset = data.ArrayDataset(np.arange(50))
    loader = data.DataLoader(dataset, 8, shuffle=True, seed=1)
    first, second = numbers(loader), numbers(loader)
    for order in (first, second):
        assert sorted(i for batch in order for i in batch) == list(range(50))
    assert first != second
    again = data.DataLoader(dataset, 8, shuffle=True, seed=1)
    assert [numbers(again), numbers(again)] == [first, second]
    assert numbers(data.DataLoader(dataset, 8, shuffle=True, seed=2)) != first
    # Two epochs at once do not disturb each other.
    pairs = data.DataLoader(dataset, 8, shuffle=True, seed=1)
    together = list(zip(pairs, pairs, strict=True))
    assert [x.numpy().tolist() for (x,), _ in together] == first
    assert [x.numpy().tolist() for _, (x,) in together] == second


def test_without_a_seed_manual_seed_decides():
    dataset, orders = data.ArrayDataset(np.arange(50)), []
    for seed in (1, 1, 2):
        mytorch.manual_seed(seed)
        orders.append(numbers(data.DataLoader(dataset, 50, shuffle=True)))
    assert orders[0] == orders[1] != orders[2]


class Squares(data.Dataset):
    """Examples of every kind."""

    def __len__(self):
        return 5

    def __getitem__(self, i):
        return i, i**2 / 2, np.full((2,), i, "float32"), Tensor.ones((3, 1)) * i


def test_a_dataset_of_ones_own():
    whole, half, array, tensor = next(iter(data.DataLoader(Squares(), 4)))
    assert whole.dtype == mytorch.int64
    assert half.dtype == mytorch.float32
    assert half.numpy().tolist() == [0, 0.5, 2, 4.5]
    assert array.shape == (4, 2)
    assert tensor.shape == (4, 3, 1)

    class Single(Squares):
        def __getitem__(self, i):
            return np.array(i)

    assert next(iter(data.DataLoader(Single(), 2))).numpy().tolist() == [0, 1]


def test_tensors_make_a_dataset_too():
    dataset = data.ArrayDataset(Tensor.ones((3, 2)), np.arange(3))
    assert len(dataset) == 3
    assert dataset[1][0].tolist() == [1, 1]
    assert dataset[2][1] == 2


def ragged():
    class Ragged(Squares):
        def __getitem__(self, i):
            return np.zeros(i + 1)

    return next(iter(data.DataLoader(Ragged(), 2)))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            lambda: data.ArrayDataset(np.zeros(3), np.zeros((4, 2))),
            "ArrayDataset wants arrays of one length, got shapes [3], [4, 2]",
        ),
        (lambda: data.ArrayDataset(), "got shapes none"),
        (lambda: data.ArrayDataset(np.zeros(())), "got shapes []"),
        (lambda: data.DataLoader([1, 2]), "DataLoader takes a Dataset, not list: wrap arrays in ArrayDataset"),
        (lambda: data.DataLoader(Squares(), 0), "batch_size is an integer of at least 1, not 0"),
        (lambda: len(data.Dataset()), "Dataset must implement __len__"),
        (lambda: data.Dataset()[0], "Dataset must implement __getitem__"),
        (ragged, "the examples of a batch must have one shape, got [1], [2]"),
    ],
)
def test_errors(make, said):
    with pytest.raises((TypeError, ValueError, NotImplementedError)) as error:
        make()
    assert said in str(error.value)


def test_a_loader_draws_only_to_shuffle():
    mytorch.manual_seed(5)
    expected = Tensor.randn((3,)).numpy()
    mytorch.manual_seed(5)
    data.DataLoader(data.ArrayDataset(np.arange(4)))
    assert (Tensor.randn((3,)).numpy() == expected).all()
    with pytest.raises(ValueError, match="seed is an integer of at least 0"):
        data.DataLoader(data.ArrayDataset(np.arange(4)), seed=-1)
