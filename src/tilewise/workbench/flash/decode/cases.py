"""Attention over a cache: the cases that verify checks."""

from collections.abc import Callable
from typing import Any

from tilewise.verify import drawing
from tilewise.verify.suite import Case, Suite
from tilewise.workbench.flash.decode import planted
from tilewise.workbench.flash.decode.problem import LAYOUTS, SINKS, Decode


def _case(name: str, about: str, **parameters: Any) -> Case:
    return Case(name, about, Decode(**parameters))


_SIZES: dict[str, Any] = {"H": 8, "Hk": 2, "D": 32, "Dv": 64}
_EIGHT = (4000, 1024, 515, 1, 0, 63, 2048, 300)

CASES = (
    _case("small", "3 entries, 2 new keys, T 2, H 4, Hk 2, D 16, Dv 32", T=2, new=2, Hk=2, Dv=32),
    _case("medium", "4 entries to 200 keys, 4 new, T 4, D 32, Dv 64", lengths=(200, 65, 0, 1), T=4, new=4, **_SIZES),
    _case("large", "4 entries to 2000 keys, 1 new, D 32, Dv 64", lengths=(2000, 515, 3, 0), new=1, **_SIZES),
    _case("xl", "8 entries to 4000 keys in pages of 64, D 32, Dv 64", lengths=_EIGHT, new=1, page=64, **_SIZES),
    _case("xxl", "16 entries to 4000 keys, T 4, D 32, Dv 64", lengths=_EIGHT + _EIGHT[::-1], T=4, **_SIZES),
    _case("no-keys", "empty caches: output 0, LSE -inf", lengths=(0, 0), H=2, D=8),
    _case("no-queries", "keys and not one query: they are written all the same", lengths=(5, 0), T=0, new=3, H=2, D=8),
    _case("first-keys", "empty caches that 3 keys are written into", lengths=(0, 0), T=3, new=3, H=2),
    _case("block", "63, 64 and 65 keys, around a tile", lengths=(63, 64, 65), H=2),
    _case("more-new", "20 new keys, the last 3 have queries", lengths=(30, 0), T=3, new=20, H=2),
    _case("fewer-new", "2 new keys, queries of 5", lengths=(30, 0, 9), T=5, new=2, H=2),
    _case("sees-nothing", "9 queries over 4 keys: the first see none", lengths=(4, 12), T=9, H=2),
    _case("full", "not causal", lengths=(33, 1), T=4, new=4, H=2, causal=False),
    _case("number", "one length for all, as a number", lengths=(33, 33), new=1, H=2, number=True),
    _case("splits", "3 splits of 2 to 4 tiles of 128 keys, T 2", lengths=(500, 130, 7), T=2, new=1, H=2, D=8, splits=3),
    _case("own-splits", "1030 keys, which are split by themselves", lengths=(1030, 3), H=2, Hk=1, D=8),
    _case(
        "splits-pages",
        "4 splits of keys in pages of 16, T 3, softcap",
        lengths=(400, 0, 150),
        T=3,
        new=3,
        H=4,
        Hk=2,
        D=8,
        page=16,
        splits=4,
        softcap=4.0,
    ),
    _case("many-splits", "more splits than are merged at a time, T 3", lengths=(2300,), T=3, H=1, D=8, splits=18),
    _case("many-splits-pages", "the same in pages of 128", lengths=(2176,), T=2, H=1, D=4, splits=17, page=128),
    _case("pages", "pages of 16, 1 new key", lengths=(40, 0, 15, 16), new=1, Hk=2, page=16),
    _case(
        "pages-48", "pages of 48, neither a part nor a multiple of a tile", lengths=(150, 31), T=2, new=2, H=2, page=48
    ),
    _case("pages-256", "pages of 256, not causal", lengths=(300, 256), T=2, H=2, page=256, causal=False),
    _case("pages-512", "pages of 512, of several tiles", lengths=(600, 30), H=2, D=8, page=512),
    _case("pages-many-new", "40 keys written into pages of 16", lengths=(10, 0), T=2, new=40, H=2, page=16),
    _case("leftpad", "left padding: none, some, all slots", lengths=(40, 33, 9), T=2, Hk=2, leftpad=(0, 31, 9)),
    _case("leftpad-prefill", "left padding before 70 queries", lengths=(200, 90), T=70, H=2, leftpad=(150, 3)),
    _case(
        "leftpad-mqa", "left padding, 64 query heads, one KV head", lengths=(300,), T=2, H=64, Hk=1, D=8, leftpad=(140,)
    ),
    _case(
        "leftpad-splits",
        "left padding of two tiles, 2 splits, a window",
        lengths=(400, 300),
        T=2,
        H=2,
        D=8,
        leftpad=(260, 1),
        splits=2,
        window=(200, 0),
    ),
    _case("window", "a window of 20 keys, T 4", lengths=(90, 12), T=4, new=4, H=2, window=(19, 0)),
    _case(
        "window-splits",
        "a window of 217 keys of 600, in 2 splits",
        lengths=(600, 90),
        T=2,
        H=2,
        D=8,
        window=(216, 0),
        splits=2,
    ),
    _case(
        "window-both", "not causal, 10 keys before, 1 after", lengths=(77, 5), T=6, H=2, causal=False, window=(10, 1)
    ),
    _case("negative-scale", "scale -0.3", lengths=(50, 3), H=2, scale=-0.3),
    _case("softcap", "scores capped at ±4, scale -0.5", lengths=(50, 3), T=2, H=2, scale=-0.5, softcap=4.0),
    _case("zero-scale", "scale 0: the mean of the values", lengths=(50, 3), T=2, H=2, scale=0.0),
    _case("sinks", "a sink for each of 6 query heads, 2 KV heads", lengths=(40, 0, 9), T=2, H=6, Hk=2, sinks="plain"),
    _case(
        "sinks-splits",
        "sinks, every other -inf, 3 splits",
        lengths=(300, 0, 150),
        T=2,
        H=4,
        Hk=2,
        D=8,
        sinks="off",
        splits=3,
    ),
    _case("sinks-large", "sinks and logits up to about ±1e4", lengths=(49, 9), H=4, size=2500.0, sinks="large"),
    _case("large-logits", "logits up to about ±1e4, 2 splits", lengths=(200, 20), H=2, size=2500.0, splits=2),
    _case("gqa-8", "8 query heads a KV head, T 3: tiles of 8 tokens", lengths=(70, 20), T=3, new=3, H=16, Hk=2, D=8),
    _case("gqa-6-tiles", "6 query heads a KV head, T 40: 3 tiles", lengths=(50, 3), T=40, H=6, Hk=1, D=8),
    _case("gqa-16", "16 query heads a KV head", lengths=(40, 9), new=1, H=16, Hk=1),
    _case("mqa-64", "64 query heads, one KV head, T 3: two chunks of heads", lengths=(70,), T=3, H=64, Hk=1, D=8),
    _case("gqa-160", "160 query heads a KV head: two tiles of 80", lengths=(40,), H=320, Hk=2, D=8),
    _case("gqa-130", "130 query heads a KV head: two tiles of 65, T 2", lengths=(9,), T=2, H=260, Hk=2, D=4),
    _case("prefill", "a prefill of 130 tokens into empty caches and behind 33", lengths=(0, 33), T=130, new=130, H=2),
    _case("one-channel", "D 1, Dv 1", lengths=(33, 2), new=1, H=2, D=1),
    _case("odd-channels", "D 40, Dv 24", lengths=(65, 0), T=2, new=2, H=2, D=40, Dv=24),
    _case(
        "strided", "transposed q, k and cache of keys, cut values", lengths=(40, 7), T=3, new=3, Hk=2, layout="mixed"
    ),
    _case(
        "strided-pages",
        "the same on lines of 16 bytes, 30 new keys in pages of 32",
        lengths=(40, 7),
        new=30,
        Hk=2,
        page=32,
        layout="mixed-aligned",
    ),
    _case("packed", "packed queries, a number an entry", lengths=(70, 33, 5, 0), queries=(33, 1, 0, 4), Hk=2),
    _case(
        "packed-leftpad",
        "packed queries, left padding, not causal",
        lengths=(40, 17),
        queries=(3, 5),
        H=2,
        leftpad=(9, 0),
        causal=False,
    ),
    _case(
        "packed-pages",
        "packed queries over pages of 48, 2 splits, a window, sinks",
        lengths=(260, 3, 150),
        queries=(5, 0, 2),
        H=4,
        Hk=2,
        D=8,
        page=48,
        splits=2,
        window=(130, 0),
        sinks="plain",
    ),
    _case(
        "packed-own-splits",
        "packed queries whose entries are split",
        lengths=(1100, 600),
        queries=(2, 1),
        H=1,
        D=8,
        page=64,
    ),
    _case(
        "prefill-sinks-72",
        "a prefill of 70 tokens, D 72, a window, sinks",
        lengths=(100, 7),
        T=70,
        new=70,
        Hk=2,
        D=72,
        window=(90, 0),
        sinks="off",
    ),
    _case(
        "prefill-leftpad-72",
        "100 queries, D 72, Dv 64, left padding, softcap, not causal",
        lengths=(300, 160),
        T=100,
        H=2,
        D=72,
        Dv=64,
        leftpad=(150, 3),
        softcap=4.0,
        causal=False,
    ),
    _case("prefill-300", "a prefill of 300 tokens, D 80", lengths=(0, 70), T=300, new=300, H=4, Hk=2, D=80),
    _case(
        "prefill-pages-128",
        "100 tokens behind 500 in pages of 64, D 128",
        lengths=(500, 30),
        T=100,
        new=100,
        H=4,
        Hk=2,
        D=128,
        page=64,
    ),
    _case("step-128", "D 128, 4 query heads a KV head", lengths=(3000, 1000, 1), new=1, H=32, Hk=8, D=128),
    _case("step-pages-128", "D 128, T 4, pages of 16", lengths=(700, 515, 0), T=4, new=4, H=16, Hk=4, D=128, page=16),
    _case("mqa-128", "D 128, 128 query heads, one KV head", lengths=(1500, 70), new=1, H=128, Hk=1, D=128),
    _case(
        "d-96-dv-128", "D 96, Dv 128, left padding", lengths=(200, 90), T=2, H=4, Hk=1, D=96, Dv=128, leftpad=(50, 0)
    ),
    _case(
        "d-192-dv-256",
        "D 192, Dv 256, sinks, a window",
        lengths=(150, 9),
        T=5,
        new=5,
        H=4,
        Hk=2,
        D=192,
        Dv=256,
        window=(70, 0),
        sinks="plain",
    ),
    _case("d-256-dv-64", "D 256, Dv 64, 3 splits", lengths=(300, 40), H=4, Hk=2, D=256, Dv=64, splits=3),
    _case(
        "packed-128",
        "packed queries, D 128, pages of 64",
        lengths=(700, 30, 515),
        queries=(130, 0, 1),
        H=8,
        Hk=2,
        D=128,
        page=64,
    ),
)


def draw(draw: Callable[[Any], Any], longest: int) -> Decode:
    """A problem of any shape and any options."""
    from hypothesis import strategies as st

    lengths = drawing.packed(draw, longest // 2)
    room = drawing.Room(longest, zip(lengths, lengths, strict=True))
    few = st.integers(0, 5) | st.integers(0, min(100, longest // 4))
    packed, page = draw(st.booleans()), draw(st.sampled_from((0, 16, 48, 64)))
    limit = st.integers(-1, 100) | st.integers(-1, longest)
    padded = not page and draw(st.booleans())
    sizes: dict[str, Any] = (
        {"queries": tuple(draw(few) for _ in lengths)} if packed else {"T": draw(few), "new": draw(few)}
    )
    return Decode(
        lengths,
        **sizes,
        **room.grouped_heads(draw),
        D=draw(room.channels()),
        Dv=draw(st.none() | room.channels()),
        page=page,
        leftpad=tuple(draw(st.integers(0, length)) for length in lengths) if padded else (),
        causal=not draw(st.booleans()),
        window=draw(st.just(()) | st.tuples(limit, limit)),
        softcap=drawing.softcap(draw),
        scale=drawing.scale(draw),
        sinks=draw(st.sampled_from(SINKS)),
        splits=draw(st.integers(0, 4)),
        size=draw(st.sampled_from((1.0, 10.0))),
        layout=draw(st.sampled_from(LAYOUTS)),
    )


SUITE = Suite(
    Decode,
    CASES,
    # A prefill: a matrix of its scores would grow as T².
    growth=Decode(lengths=(0,), T=128, new=128, H=1),
    # Of two splits each, that follow its own length.
    use=Decode(lengths=(150, 0, 70), T=2, new=2, H=2, Hk=1, D=8, page=16, splits=2),
    draw=draw,
    cheap_to_use=True,
    mutants=planted.DECODE + planted.INVARIANCE + planted.HOPPER,
    hopper=("prefill-sinks-72", "prefill-leftpad-72", "prefill-300"),
    leave_out=("lengths=300/250,T=200,H=4,D=64", "lengths=40,T=300,H=4,D=64,causal=false"),
    dear=("many-splits-pages", "splits", "leftpad-splits", "packed-own-splits", "prefill"),
)
