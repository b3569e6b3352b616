"""Kernels run compiled where there is a GPU, interpreted elsewhere; fresh memory is poisoned with NaN everywhere."""

import os

if "PYTEST_XDIST_WORKER" in os.environ:
    # There is a process for every core: threads of theirs would wait for each other, forty times as long as the work
    # itself. NumPy's are counted when it is imported.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from tilewise import interpreter

interpreter.use_where_no_gpu()

import shutil  # noqa: E402

import pytest  # noqa: E402
import torch  # noqa: E402

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)


def pytest_collection_modifyitems(items):
    # The longest are spread over the list, of which every worker gets a part: none is left to the end.
    longest = [item for item in items if "catch_every_planted_bug" in item.name]
    others = [item for item in items if item not in longest]
    for i, item in enumerate(longest):
        others.insert(i * (len(items) // len(longest)), item)
    items[:] = others


@pytest.fixture(autouse=True)
def poisoned_memory():
    """torch fills fresh floating-point memory with NaN, so that a result left unwritten shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def free_order(request, poisoned_memory):
    """For tests of deterministic=False, which torch's flag would overrule: it is off, and memory is not poisoned.

    Where the test has a parameter `deterministic` that is True, nothing changes.
    """
    if not getattr(request.node, "callspec", None) or not request.node.callspec.params.get("deterministic", False):
        torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where kernels run: the GPU where there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="module")
def browser():
    """Chromium; where there is none, the test is skipped with its reason."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if path is None:
        pytest.skip("no browser: none of chromium, chromium-browser and google-chrome is on the PATH")
    with playwright.sync_playwright() as started:
        launched = started.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield launched
        launched.close()


@pytest.fixture
def opened(browser, tmp_path):
    """Opens a page; at the end nothing must have been logged or fetched."""
    said, fetched, contexts = [], [], []

    def open_(text, width=1280, scheme="light"):
        file = tmp_path / "page.html"
        file.write_text(text, encoding="utf-8")
        contexts.append(browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme))
        page = contexts[-1].new_page()
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: fetched.append(request.url))
        page.goto(file.as_uri())
        return page

    yield open_
    for context in contexts:
        context.close()
    assert said == []
    assert [url for url in fetched if not url.startswith(("file:", "data:"))] == []
