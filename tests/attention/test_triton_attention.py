"""The Triton path kernels against an explicit mask in fp64, in triton's interpreter where there is no CUDA."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from longtune.attention.kernels import Reference
from longtune.attention.path import PathAttention, Score
from longtune.attention.store import KVStore
from longtune.attention.triton_path import Blocks, Sizes, TritonPath, make_tables, needed, sizes
from longtune.tree import Forest
from tests import support
from tests.attention.test_path import SCORES, check

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = Sizes(Blocks(16, 16, 4, 1), Blocks(16, 16, 4, 1), Blocks(16, 16, 4, 1))
TOLERANCE = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}


def attention(forced: Sizes | None = SMALL) -> PathAttention:
    return PathAttention(Reference(), Reference(), 4, [TritonPath(always=True, forced=forced)])


def run(score, chunk_tokens, row=None, shape=(4, 2, 8, 6), dtype=torch.float32, forced=SMALL):
    check(
        attention(forced), score, chunk_tokens, dtype=dtype, tolerance=TOLERANCE[dtype], device=DEVICE, row=row,
        shape=shape,
    )  # fmt: skip


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("score", ["plain", "window 5", "window longer than the row", "window and softcap"])
def test_paths_equal_an_explicit_mask(score):
    run(SCORES[score], 8, shape=(2, 1, 8, 6))


@pytest.mark.usefixtures("poisoned_empty")
def test_sinks_are_terms_of_the_softmax():
    row = Forest([support.random_sequence(19)])
    run(SCORES["window and sinks"], 16, row)


ROWS = {
    "one long sequence": lambda: Forest([support.random_sequence(83)]),
    "a shared prompt": lambda: Forest([support.pair_tree(37, (18, 21)), support.random_sequence(16)]),
}


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("score", [Score(0.2), Score(0.2, softcap=0.7, window=19)], ids=str)
def test_more_than_one_block(row, score):
    run(score, 34, row(), shape=(2, 1, 16, 16))


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("shape", [(4, 4, 80, 80), (2, 1, 24, 40), (4, 1, 96, 64)], ids=str)
def test_widths_and_groups(shape):
    run(Score(0.1, window=30), 40, Forest([support.pair_tree(12, (18, 11))]), shape)


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("blocks", [(32, 16), (16, 32)], ids=str)
def test_tiles_of_unequal_sides_in_half_precision(blocks):
    forced = Sizes(*(Blocks(*blocks, 4, 1) for _ in range(3)))
    run(Score(0.2, window=19), 50, Forest([support.random_sequence(61)]), (1, 1, 16, 16), torch.float16, forced)


def test_tables_hold_what_some_query_sees():
    row = Forest([support.random_sequence(400)])
    chunk = row.chunks(100)[3]
    tables = make_tables(chunk, 30, torch.device("cpu"), query_block=32, key_block=64)
    assert tables.ranges.tolist() == [[300 - 29, 129, 300 - 29]]
    assert int(tables.key_tiles[:, 1].sum()) == 129
    assert sorted(tables.query_tiles[:, :3].tolist()) == [[0, 32, 300], [32, 32, 332], [64, 32, 364], [96, 4, 396]]


def test_siblings_read_their_prompt_and_not_each_other():
    row = Forest([support.pair_tree(5, (3, 2))])
    tables = make_tables(row.chunks(None)[0], None, torch.device("cpu"), query_block=16, key_block=16)
    readers = {tuple(tile[:3]): tables.readers[tile[3] : tile[4]].tolist() for tile in tables.key_tiles.tolist()}
    assert readers == {
        (0, 5, 0): [[0, 5, 0], [5, 3, 5], [8, 2, 5]],
        (5, 3, 5): [[5, 3, 5]],
        (8, 2, 5): [[8, 2, 5]],
    }


REAL = [
    ((8, 2, 128, 128), Score(0.1), torch.bfloat16),
    ((8, 2, 128, 128), Score(0.1, window=129, softcap=20.0), torch.bfloat16),
    ((8, 8, 64, 64), Score(0.1, window=129), torch.float16),
    ((4, 1, 256, 256), Score(0.1, softcap=20.0), torch.bfloat16),
    ((4, 4, 192, 128), Score(0.1), torch.bfloat16),
    ((2, 1, 96, 96), Score(0.1, softcap=20.0), torch.float32),
    ((4, 2, 64, 64), Score(0.1, window=129), torch.float32),
    ((2, 1, 256, 256), Score(0.1), torch.float32),
]


@pytest.mark.skipif(DEVICE == "cpu", reason="needs CUDA: sizes of real models")
@pytest.mark.parametrize("shape, score, dtype", REAL, ids=str)
def test_real_sizes(shape, score, dtype):
    row = Forest([support.pair_tree(300, (170, 229)), support.random_sequence(457), support.random_sequence(1)])
    for chunk_tokens in (None, 333):
        run(score, chunk_tokens, row, shape, dtype, forced=None)


def test_what_it_takes_beside_a_block_kernel():
    """Softcap, many spans and odd lengths; windows only where flash attention can't; nothing wider than 256."""

    def takes(row, score=Score(0.1), shape=(2, 1, 16, 16), grain=None, chunk_tokens=None, **options):  # noqa: B008
        heads, key_heads, width, value_width = shape
        chunk = row.chunks(chunk_tokens)[-1]
        store = KVStore(row.size)
        for each in row.chunks(chunk_tokens):
            store.write(each, *(torch.empty(1, key_heads, each.size, w) for w in (width, value_width)))
        return TritonPath(grain=grain, **options).accepts(torch.empty(1, heads, chunk.size, width), store, chunk, score)

    long, many = Forest([support.random_sequence(96)]), Forest([support.random_sequence(4) for _ in range(5)])
    assert not takes(long) and not takes(long, grain=32) and takes(long, grain=64) and not takes(long, grain=128)
    assert takes(many) and takes(long, Score(0.1, softcap=1.0))
    window = Score(0.1, window=8)
    assert not takes(long, window) and takes(long, window, (2, 1, 16, 24)) and takes(long, window, (2, 1, 20, 20))
    assert takes(long, window, windows=True) and not takes(long, windows=True)
    assert not takes(many, shape=(2, 1, 16, 320)) and not takes(long, Score(0.1, softcap=1.0), (2, 1, 320, 16))


@pytest.mark.parametrize("shared", [232_448, 166_912, 101_376])
@pytest.mark.parametrize("width", [16, 64, 96, 128, 256])
@pytest.mark.parametrize("short", [False, True])
def test_tiles_fit_the_shared_memory_of_a_card(shared, width, short):
    found = sizes(width, width, torch.bfloat16, short, shared)
    rounded = max(64, 1 << (width - 1).bit_length())
    for kernel in ("forward", "dq", "dkv"):
        assert needed(kernel, getattr(found, kernel), rounded) <= shared
