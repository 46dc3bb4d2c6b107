int64_t flatten_rows(const table_batch* batch) {
  int64_t flat = 0, num_samples = 0;
  batch->query_start_loc[0] = 0;
  for (int64_t row = 0; row < batch->num_rows; row++) {
    const int64_t slot = batch->slots[row], start = batch->starts[row], end = start + batch->num_new_tokens[row];
    const int32_t* token_ids = batch->token_ids + slot * batch->token_stride;
    for (int64_t group = 0; group < batch->num_groups; group++) {
      const int32_t* blocks = batch->block_tables + (group * batch->num_slots + slot) * batch->block_stride;
      int64_t* mapping = batch->slot_mapping + group * batch->num_tokens + flat;
      for (int64_t position = start; position < end; position++)
        mapping[position - start] =
            blocks[position / batch->block_size] * batch->block_size + position % batch->block_size;
      memcpy(batch->flat_tables + (group * batch->num_rows + row) * batch->max_blocks, blocks,
             sizeof(int32_t) * (size_t)batch->max_blocks);
    }
    for (int64_t position = start; position < end; position++, flat++) {
      batch->flat_token_ids[flat] = token_ids[position];
      batch->positions[flat] = position;
    }
    batch->query_start_loc[row + 1] = (int32_t)flat;
    batch->seq_lens[row] = (int32_t)end;
    if (batch->samples[row]) batch->sampling_indices[num_samples++] = flat - 1;
  }
  return num_samples;
}
