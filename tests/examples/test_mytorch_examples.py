"""mytorch's examples, small: each learns, prints its figure, draws its curve and repeats by seed."""

import gzip
import importlib
import re
import struct
from pathlib import Path

import numpy as np
import pytest
from against_torch import on

import mytorch

pytest.importorskip("matplotlib", reason="matplotlib is not installed")
pytest.importorskip("sklearn", reason="scikit-learn is not installed")
testing = pytest.importorskip("typer.testing", reason="typer is not installed")
typer = pytest.importorskip("typer", reason="typer is not installed")
EXAMPLES = Path(__file__).parent.parent.parent / "examples"


@pytest.fixture
def load(monkeypatch):
    """An example by name, imported as when it is run: its folder comes first."""
    monkeypatch.syspath_prepend(EXAMPLES)
    # Rich would break lines at the width of a terminal that is not there.
    monkeypatch.setenv("COLUMNS", "200")
    return lambda name: importlib.import_module(f"mytorch_{name}")


@pytest.fixture
def run(load, tmp_path, monkeypatch, capsys):
    """Runs an example with options as on the command line; returns what it prints. Its picture must be there."""
    monkeypatch.chdir(tmp_path)

    def run_(name, *options, backend="serial"):
        app = typer.Typer()
        app.command()(load(name).main)
        with on(backend):
            found = testing.CliRunner().invoke(app, [*options, "--plot", "curve.png"], catch_exceptions=False)
        printed = found.output + capsys.readouterr().out
        assert found.exit_code == 0, printed
        assert "loss curve: curve.png" in printed
        assert Path("curve.png").read_bytes().startswith(b"\x89PNG")
        return printed

    return run_


def number(pattern, printed):
    found = re.search(pattern, printed)
    assert found, printed
    return float(found[1])


def test_linear_regression(run):
    printed = run("linear_regression", "--epochs", "10")
    assert number(r"largest error: ([\d.]+)", printed) < 0.02
    figures = [line for line in printed.splitlines() if "found" in line]
    assert len(figures) == 4
    assert figures == [line for line in run("linear_regression", "--epochs", "10").splitlines() if "found" in line]
    assert figures != [
        line for line in run("linear_regression", "--epochs", "10", "--seed", "1").splitlines() if "found" in line
    ]


def test_own_function(run, load):
    printed = run("own_function")
    assert "gradcheck: the gradient agrees" in printed
    assert number(r"mean squared error: ([\d.]+)", printed) < 0.001
    x = mytorch.Tensor.create([-1000.0, -1.0, 0.0, 1.0, 1000.0])
    assert np.allclose(load("own_function").Softplus().apply(x).numpy(), [0, 0.3132617, 0.6931472, 1.3132617, 1000])


ACCURACY = r"accuracy on \d+ held-out digits: ([\d.]+)%"


def test_digits_with_linear_layers(run):
    printed = run("digits", "--model", "mlp", "--epochs", "10", backend="parallel")
    assert number(ACCURACY, printed) > 93
    assert "Linear(64, 128)" in printed


@pytest.mark.slow
def test_the_cnn_reaches_97_percent(run):
    printed = run("digits", backend="parallel")
    assert number(ACCURACY, printed) >= 97
    assert printed.count("Conv2D(") == printed.count("MaxPool2D(") == 2
    assert printed.count("Linear(") == 3


def idx(array):
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.astype("uint8").tobytes()


@pytest.mark.slow
def test_mnist_files(run, load, tmp_path):
    """Files in MNIST's format, two of them compressed: images of 12 × 12 in which the digit is the bright row."""
    classes = np.arange(300) % 10
    images = np.random.default_rng(0).integers(0, 60, (300, 12, 12))
    images[np.arange(300), classes] = 255
    for name, array in zip(
        load("digits").MNIST, (images[:250], classes[:250], images[250:], classes[250:]), strict=True
    ):
        if "train" in name:
            (tmp_path / name).write_bytes(idx(array))
        else:
            (tmp_path / f"{name}.gz").write_bytes(gzip.compress(idx(array)))
    printed = run("digits", "--mnist", str(tmp_path), "--epochs", "6", backend="parallel")
    assert "accuracy on 50 held-out digits" in printed
    assert number(ACCURACY, printed) > 80
    (tmp_path / load("digits").MNIST[0]).write_bytes(idx(classes))
    with pytest.raises(ValueError, match=r"must hold an array of 3 axes, and its shape is \[300\]"):
        run("digits", "--mnist", str(tmp_path))
    (tmp_path / load("digits").MNIST[0]).unlink()
    with pytest.raises(FileNotFoundError, match="there is no IDX file"):
        run("digits", "--mnist", str(tmp_path))


@pytest.mark.slow
def test_char_transformer(run):
    printed = run("char_transformer", "--steps", "30", "--sample", "20", backend="parallel")
    assert "Alice was beginning to " in printed
    first, last = number(r"([\d.]+) on seen text at first", printed), number(r"held-out text: ([\d.]+) nats", printed)
    assert last < 3.3 < 4 < first
