"""The demo's text and batches."""

from pathlib import Path

import pytest
import torch

from outerstep.demo.corpus import BatchStream, Corpus, evaluation_batches, load_corpus


def write_files(root: Path, count: int, size_bytes: int = 100) -> None:
    """`count` modules whose bytes are all their own index, so that a test can tell them apart."""
    for index in range(count):
        (root / f"module_{index:03}.py").write_bytes(bytes([index]) * size_bytes)


def load_small(root: Path, max_bytes: int = 10**6) -> Corpus:
    return load_corpus(root, max_bytes=max_bytes, min_bytes=1)


@pytest.fixture(scope="module")
def text() -> torch.Tensor:
    return torch.arange(10_000).remainder(251).to(torch.uint8)


class TestCorpus:
    def test_this_interpreter_has_enough_standard_library(self) -> None:
        corpus = load_corpus()
        assert corpus.train.dtype == corpus.held_out.dtype == torch.uint8
        assert len(corpus.train) > 10 * len(corpus.held_out) > 10 * 50_000
        assert b"def __init__(self" in bytes(corpus.train.numpy())

    def test_loading_twice_gives_the_same_bytes(self) -> None:
        first, second = load_corpus(), load_corpus()
        assert torch.equal(first.train, second.train)
        assert torch.equal(first.held_out, second.held_out)

    def test_every_twentieth_file_is_held_out_and_never_trained_on(self, tmp_path: Path) -> None:
        write_files(tmp_path, 45)
        corpus = load_small(tmp_path)
        assert set(corpus.held_out.tolist()) == {19, 39}
        assert set(corpus.train.tolist()) == set(range(45)) - {19, 39}

    def test_files_are_read_in_the_order_of_their_paths(self, tmp_path: Path) -> None:
        write_files(tmp_path, 20)
        (tmp_path / "a").mkdir()
        (tmp_path / "a" / "z.py").write_bytes(b"\xff" * 3)
        in_order = dict.fromkeys(load_small(tmp_path).train.tolist())
        assert list(in_order) == [255, *range(18), 19]

    @pytest.mark.parametrize(
        "skipped",
        [
            "test/test_it.py",
            "package/tests/it.py",
            "site-packages/it.py",
            "__pycache__/it.py",
            "idlelib/it.py",
            "lib2to3/it.py",
            "encodings/cp437.py",
            "config-3.11-x86_64-linux-gnu/python-config.py",
            "_sysconfigdata__linux_x86_64-linux-gnu.py",
            "notes.txt",
        ],
    )
    def test_what_is_not_library_source_is_skipped(self, tmp_path: Path, skipped: str) -> None:
        write_files(tmp_path, 20)
        (tmp_path / skipped).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / skipped).write_bytes(b"\xff" * 100)
        corpus = load_small(tmp_path)
        assert 255 not in corpus.train
        assert 255 not in corpus.held_out

    def test_the_size_is_bounded_by_whole_files(self, tmp_path: Path) -> None:
        write_files(tmp_path, 60)
        corpus = load_small(tmp_path, max_bytes=2_550)
        assert len(corpus.train) + len(corpus.held_out) == 2_500

    def test_line_endings_are_the_same_on_every_platform(self, tmp_path: Path) -> None:
        write_files(tmp_path, 20)
        (tmp_path / "a.py").write_bytes(b"x = 1\r\ny = 2\r\n")
        assert bytes(load_small(tmp_path).train[:12].numpy()) == b"x = 1\ny = 2\n"

    def test_too_little_text_is_refused_with_the_place_and_a_remedy(self, tmp_path: Path) -> None:
        write_files(tmp_path, 20)
        with pytest.raises(ValueError, match=r"found 2,000 bytes in 20 files under .*\. Use a Python"):
            load_corpus(tmp_path)

    def test_a_corpus_without_a_held_out_file_is_refused(self, tmp_path: Path) -> None:
        write_files(tmp_path, 19)
        with pytest.raises(ValueError, match="in 20 files or more"):
            load_small(tmp_path)

    def test_a_missing_folder_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="found 0 bytes in 0 files"):
            load_corpus(tmp_path / "nowhere")


class TestBatchStream:
    def test_targets_are_the_inputs_one_byte_later(self, text: torch.Tensor) -> None:
        inputs, targets = BatchStream(text, batch_size=3, context=16).batch(5)
        assert inputs.shape == targets.shape == (3, 16)
        assert inputs.dtype == targets.dtype == torch.int64
        assert torch.equal(inputs[:, 1:], targets[:, :-1])
        assert torch.equal((inputs + 1).remainder(251), targets)

    def test_a_batch_depends_on_nothing_that_was_asked_before(self, text: torch.Tensor) -> None:
        used = BatchStream(text, shard=1, seed=3)
        for step in range(10):
            used.batch(step)
        torch.rand(7)
        fresh = BatchStream(text, shard=1, seed=3)
        assert torch.equal(used.batch(4)[0], fresh.batch(4)[0])

    def test_drawing_batches_leaves_the_global_random_state_alone(self, text: torch.Tensor) -> None:
        before = torch.get_rng_state()
        BatchStream(text).batch(0)
        assert torch.equal(torch.get_rng_state(), before)

    def test_seed_shard_and_step_each_change_the_batch(self, text: torch.Tensor) -> None:
        # (1, 0, 0), (0, 1, 0) and (0, 0, 1) would collide if the three were merely added up.
        batches = [
            BatchStream(text, seed=seed, shard=shard).batch(step)[0]
            for seed, shard, step in [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)]
        ]
        for i, first in enumerate(batches):
            for second in batches[i + 1 :]:
                assert not torch.equal(first, second)

    def test_every_window_can_be_drawn_even_the_last(self) -> None:
        stream = BatchStream(torch.arange(6, dtype=torch.uint8), batch_size=64, context=4)
        assert set(stream.batch(0)[0][:, 0].tolist()) == {0, 1}

    def test_a_text_no_longer_than_the_context_is_refused(self) -> None:
        with pytest.raises(ValueError, match=r"longer than one context \(8 bytes\), got 8 bytes"):
            BatchStream(torch.zeros(8, dtype=torch.uint8), context=8)


class TestEvaluationBatches:
    def test_they_are_the_same_for_everybody(self, text: torch.Tensor) -> None:
        for (a, b), (c, d) in zip(evaluation_batches(text, 3), evaluation_batches(text, 3), strict=True):
            assert torch.equal(a, c)
            assert torch.equal(b, d)

    def test_they_span_the_text_from_its_first_byte_to_its_last(self, text: torch.Tensor) -> None:
        batches = evaluation_batches(text, 4, batch_size=8, context=32)
        assert [inputs.shape for inputs, _ in batches] == [(8, 32)] * 4
        assert torch.equal(batches[0][0][0], text[:32].long())
        assert torch.equal(batches[-1][1][-1], text[-32:].long())

    def test_a_single_window_is_possible(self, text: torch.Tensor) -> None:
        [(inputs, targets)] = evaluation_batches(text, 1, batch_size=1, context=32)
        assert torch.equal(inputs[0], text[:32].long())
        assert torch.equal(targets[0], text[1:33].long())
