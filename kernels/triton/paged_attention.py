"""Paged attention of a mixed batch, in two launches: one for rows that decode, one for rows with more queries.

One tile shape for both would be slow. A tile for many queries wastes most of its work on a row with one query. A tile
for one query reads the keys of a prompt once for each of its queries.
"""

from dataclasses import dataclass

from torch import Tensor

from pagewire.kernels.triton.attention_arguments import AlikeLayers, PagedCaches
from pagewire.kernels.triton.decode_attention import DecodeAttention, SplitPlan
from pagewire.kernels.triton.prefill_attention import PrefillAttention


@dataclass(frozen=True, slots=True)
class PagedAttention:
    """The attention of a step with decode rows (sequences with one new token) and prefill rows. It is prepared once per
    step for layers that are alike, so that each layer only launches kernels.

    Attributes:
        layers: the layers that are computed.
        parts: the attention of the decode rows and of the prefill rows, in the order of their launches.
    """

    layers: AlikeLayers
    parts: tuple[DecodeAttention | PrefillAttention, ...]

    @staticmethod
    def of(
        layers: AlikeLayers,
        block_tables: Tensor,
        seq_lens: Tensor,
        query_start_loc: Tensor,
        num_decodes: int,
        plan: SplitPlan | None,
    ) -> "PagedAttention":
        """Prepare attention for a step in which the host knows how many rows (running sequences) decode. The decode
        rows must come first, with one query each.

        Args:
            layers: the layers.
            block_tables, seq_lens: as in `paged_prefill`.
            query_start_loc: [S + 1] int32, on the device.
            num_decodes: number of rows at the beginning that have one query.
            plan: the split plan, decided once per step for the first `num_decodes` of seq_lens. The rows are then split
                as by `paged_attention_v2`. None means that rows are not split; see `prefers_splits`.

        Raises:
            ValueError: a shape, dtype, stride or number is not supported.
        """
        num_rows = seq_lens.numel()
        if not 0 <= num_decodes <= min(num_rows, layers.query_shape[0]):
            raise ValueError(f"num_decodes is {num_decodes} of {num_rows} rows with {layers.query_shape[0]} queries")
        parts: list[DecodeAttention | PrefillAttention] = []
        if num_decodes:
            first = slice(0, num_decodes)
            tensors = (block_tables[first], seq_lens[first])
            parts.append(DecodeAttention.of(layers, *tensors, num_decodes, plan))
        if num_decodes < num_rows:
            rest = slice(num_decodes, None)
            tensors = (block_tables[rest], seq_lens[rest])
            parts.append(PrefillAttention.of(layers, *tensors, query_start_loc[rest], num_decodes))
        return PagedAttention(layers, tuple(parts))

    @staticmethod
    def of_any_rows(
        layers: AlikeLayers,
        block_tables: Tensor,
        decode_lens: Tensor,
        prefill_lens: Tensor,
        query_start_loc: Tensor,
        plan: SplitPlan | None,
    ) -> "PagedAttention":
        """Prepare attention for a step in which only the device knows which rows (running sequences) decode. So one
        CUDA graph can be used for any mixture of decode and prefill rows.

        The decode kernel and then the prefill kernel are launched over all rows. A program ends at once if its row
        belongs to the other kernel. The decode kernel writes zeros to one query for each prefill row. The prefill
        kernel runs afterwards and writes the results of all queries of the prefill rows.

        Args:
            layers: the layers.
            block_tables, query_start_loc: as in `of`. There are at least as many queries as rows, and every query
                belongs to a row.
            decode_lens: [S] int32, seq_lens of the rows that decode, 0 for the others.
            prefill_lens: [S] int32, -1 for the rows that decode, seq_lens of the others.
            plan: the split plan decided for `decode_lens`, or None.

        Raises:
            ValueError: a shape, dtype, stride or number is not supported.
        """
        decodes = DecodeAttention.of(layers, block_tables, decode_lens, decode_lens.numel(), plan)
        prefills = PrefillAttention.of(layers, block_tables, prefill_lens, query_start_loc, 0)
        return PagedAttention(layers, (decodes, prefills))

    def attend(
        self, query: Tensor, caches: PagedCaches, sinks: Tensor | None = None, output: Tensor | None = None
    ) -> Tensor:
        """Compute attention for one layer over its paged KV cache, which already contains the keys and values of the
        step's new tokens.

        Args:
            query: [T, num_heads, head_dim], with the shape and dtype of `layers`; the last dimension dense.
            caches: the caches of the layer; see `paged_caches`.
            sinks: the sinks of the layer, [num_heads] float32; None means the sinks of the layers' scoring.
            output: memory for the result, with the query's shape and dtype, the last dimension dense; None means new
                memory.

        Returns:
            [T, num_heads, head_dim] in the dtype of the query. Queries that belong to no row are not written.

        Raises:
            ValueError: a shape, dtype, stride or number is not supported.
        """
        layer = self.layers.tensors(query, caches, sinks, output)
        for part in self.parts:
            part.launch(layer)
        return layer.output.data
