int64_t flatten_rows(const table_batch* batch) {
  int64_t flat = 0, num_samples = 0;
  batch->query_start_loc[0] = 0;
  for (int64_t row = 0; row < batch->num_rows; row++) {
    const int64_t start = batch->starts[row], end = start + batch->num_new_tokens[row];
    const int32_t* token_ids = batch->token_ids + batch->slots[row] * batch->token_stride;
    const int32_t* blocks = batch->block_tables + batch->slots[row] * batch->block_stride;
    for (int64_t position = start; position < end; position++, flat++) {
      batch->flat_token_ids[flat] = token_ids[position];
      batch->positions[flat] = position;
      batch->slot_mapping[flat] = blocks[position / batch->block_size] * batch->block_size + position % batch->block_size;
    }
    batch->query_start_loc[row + 1] = (int32_t)flat;
    batch->seq_lens[row] = (int32_t)end;
    if (batch->samples[row]) batch->sampling_indices[num_samples++] = flat - 1;
    memcpy(batch->flat_tables + row * batch->max_blocks, blocks, sizeof(int32_t) * (size_t)batch->max_blocks);
  }
  return num_samples;
}
