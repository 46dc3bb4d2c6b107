"""Tests that docs/models.md says of each kind of model what the code does with the published config.json."""

import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from docs.kinds import KINDS, Kind
from pagewire.network.checkpoint_files import CheckpointError
from pagewire.network.families import BY_ARCHITECTURE, parse_config
from pagewire.network.network import Network
from testing.checkpoints.published import published
from tests.project.documents import read

SUPPORTED = [kind for kind in KINDS if not kind.missing]
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}


def network_of(kind: Kind) -> Network:
    return parse_config(published()[kind.example].small_config)


def is_supported(kind: Kind) -> bool:
    """Return whether the published config.json of the example is supported. Without a copy of this file, the name of
    its architecture decides."""
    if kind.example not in published():
        return kind.architectures[0] in BY_ARCHITECTURE
    try:
        return network_of(kind).architecture in kind.architectures
    except CheckpointError:
        return False


def test_a_kind_is_supported_unless_something_is_missing() -> None:
    assert [kind.models for kind in KINDS if is_supported(kind) != (not kind.missing)] == []


def test_every_supported_kind_has_a_published_config() -> None:
    assert {kind.example for kind in SUPPORTED} <= published().keys() <= {kind.example for kind in KINDS}
    assert len({kind.example for kind in KINDS}) == len(KINDS)


def test_every_architecture_has_models() -> None:
    assert {name for kind in SUPPORTED for name in kind.architectures} == set(BY_ARCHITECTURE)


def test_kinds_are_in_the_order_of_their_ranks() -> None:
    ranks = [int(kind.rank) if kind.rank else None for kind in KINDS]
    ranked = [rank for rank in ranks if rank is not None]
    assert ranks == [*ranked, *[None] * (len(ranks) - len(ranked))]
    assert ranked[0] == 1
    assert {second - first for first, second in pairwise(ranked)} == {0, 1}


# Notes of docs/models.md that name families, with the property that these families have.
NOTES: dict[str, Callable[[Network], bool]] = {
    "LongRoPE": lambda network: any(rope is not None and bool(rope.short_divisors) for rope in network.ropes),
    "ALiBi": lambda network: bool(network.heads.alibi_slopes),
    "Attention sinks": lambda network: network.has_sinks,
    "Windows in every layer": lambda network: all(heads.window for heads in network.layers),
    "Windows in some layers": lambda network: len({heads.window > 0 for heads in network.layers}) == 2,
}


@pytest.mark.parametrize("note", NOTES)
def test_a_note_names_its_families(note: str) -> None:
    [text] = re.findall(rf"^- \*\*{note}.*?\n(?=- |\n)", read(Path("docs/models.md")), re.MULTILINE | re.DOTALL)
    families = {re.findall(r"[A-Za-z]+", kind.models)[0] for kind in SUPPORTED if NOTES[note](network_of(kind))}
    assert families
    assert [family for family in families if family not in text] == []


def test_quantised_checkpoints_are_supported_for_all_but_one() -> None:
    assert "For every architecture above except GPT-2." in read(Path("docs/models.md"))
    for kind in SUPPORTED:
        config = {**published()[kind.example].small_config, "quantization_config": AWQ}
        if kind.architectures == ("GPT2LMHeadModel",):
            with pytest.raises(CheckpointError, match="quantization_config"):
                parse_config(config)
        else:
            assert parse_config(config).quantization is not None
