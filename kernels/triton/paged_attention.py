"""Paged attention of a mixed batch: rows that decode and rows with more queries, as two launches and never one bad one.

A tile for many queries wastes most of its work on a row with one, and a tile for one query reads a prompt's keys once
for each of its queries.
"""

from dataclasses import dataclass

from torch import Tensor

from pagewire.kernels.arguments import Selection
from pagewire.kernels.triton.attention_arguments import LayerGroup, PagedCaches
from pagewire.kernels.triton.decode_attention import DecodeAttention, SplitPlan
from pagewire.kernels.triton.prefill_attention import PrefillAttention


@dataclass(frozen=True, slots=True)
class PagedAttention:
    """Attention of a step's S rows in a group of layers: made once, so that a layer has nothing to do but to launch.

    Attributes:
        parts: the launches, one behind the other.
    """

    group: LayerGroup
    parts: tuple[DecodeAttention | PrefillAttention, ...]

    @staticmethod
    def of(
        group: LayerGroup,
        block_tables: Tensor,
        seq_lens: Tensor,
        query_start_loc: Tensor,
        num_decodes: int,
        plan: SplitPlan | None,
        selection: Selection | None = None,
    ) -> "PagedAttention":
        """Attention of rows of which the host knows how many decode. These come first, with one query each.

        Args:
            block_tables, seq_lens, selection: of `paged_prefill`.
            query_start_loc: [S + 1] int32, on the device.
            num_decodes: how many rows come first with one query.
            plan: decided for the first `num_decodes` of seq_lens, once a step: they are cut into splits, as by
                `paged_attention_v2`. None: they are not; see `prefers_splits`.

        Raises:
            ValueError: a shape, dtype, stride or number is not one of these.
        """
        num_rows = seq_lens.numel()
        if not 0 <= num_decodes <= min(num_rows, group.query_shape[0]):
            raise ValueError(f"num_decodes is {num_decodes} of {num_rows} rows with {group.query_shape[0]} queries")
        parts: list[DecodeAttention | PrefillAttention] = []
        if num_decodes:
            first = slice(0, num_decodes)
            tensors = (block_tables[first], seq_lens[first])
            parts.append(DecodeAttention.of(group, *tensors, num_decodes, plan, _of_rows(selection, first)))
        if num_decodes < num_rows:
            rest = slice(num_decodes, None)
            tensors = (block_tables[rest], seq_lens[rest])
            starts = query_start_loc[rest]
            parts.append(PrefillAttention.of(group, *tensors, starts, num_decodes, _of_rows(selection, rest)))
        return PagedAttention(group, tuple(parts))

    @staticmethod
    def of_any_rows(
        group: LayerGroup,
        block_tables: Tensor,
        decode_lens: Tensor,
        prefill_lens: Tensor,
        query_start_loc: Tensor,
        plan: SplitPlan | None,
    ) -> "PagedAttention":
        """Attention where the device alone knows how many rows decode, so that a graph serves any mix of them.

        Both kernels are launched over all rows. Programs of rows that are not theirs end at once; the first zeroes one
        query for each of these, and the second writes those of all rows that do not decode.

        Args:
            block_tables, query_start_loc: of `of`. There are at least as many queries as rows, and every one belongs to
                a row.
            decode_lens: [S] int32, seq_lens of the rows that decode, 0 for the others.
            prefill_lens: [S] int32, -1 for the rows that decode, seq_lens of the others.
            plan: decided for `decode_lens`, or None.

        Raises:
            ValueError: a shape, dtype, stride or number is not one of these.
        """
        decodes = DecodeAttention.of(group, block_tables, decode_lens, decode_lens.numel(), plan)
        prefills = PrefillAttention.of(group, block_tables, prefill_lens, query_start_loc, 0)
        return PagedAttention(group, (decodes, prefills))

    def attend(
        self, query: Tensor, caches: PagedCaches, sinks: Tensor | None = None, output: Tensor | None = None
    ) -> Tensor:
        """Attention over one layer's paged cache, which already holds the rows' own keys and values.

        Args:
            query: [T, num_heads, head_dim], of the shape and dtype of the group; the last dimension dense.
            caches: of the layer; see `paged_caches`.
            sinks: of the layer, [num_heads] float32; None: those of the group's scoring.
            output: where to write, of the query's shape and dtype, the last dimension dense; None: new memory.

        Returns:
            [T, num_heads, head_dim], of the query's dtype. What belongs to no row is not written.

        Raises:
            ValueError: a shape, dtype, stride or number is not one of these.
        """
        layer = self.group.tensors(query, caches, sinks, output)
        for part in self.parts:
            part.launch(layer)
        return layer.output.data


def _of_rows(selection: Selection | None, rows: slice) -> Selection | None:
    return None if selection is None else Selection(selection.blocks[rows], selection.num_blocks[rows])
