// Prints llama.cpp's logits for every position of some sequences.
//
// llama_logits MODEL.gguf KV_TYPE
//
// KV_TYPE is f32, f16 or bf16. Each line of the standard input is a sequence of token ids. Each sequence is computed in
// one batch on one thread, without flash attention. The standard output receives the float32 logits [num_tokens,
// vocab_size] of each sequence, one after the other.

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "llama.h"

enum { MAX_TOKENS = 2048, MAX_LINE = MAX_TOKENS * 8 };

static void fail(const char* text) {
  fprintf(stderr, "llama_logits: %s\n", text);
  exit(1);
}

static void log_errors(enum ggml_log_level level, const char* text, void* unused) {
  (void)unused;
  if (level == GGML_LOG_LEVEL_ERROR) fputs(text, stderr);
}

static enum ggml_type cache_type(const char* name) {
  if (strcmp(name, "f32") == 0) return GGML_TYPE_F32;
  if (strcmp(name, "f16") == 0) return GGML_TYPE_F16;
  if (strcmp(name, "bf16") == 0) return GGML_TYPE_BF16;
  fail("KV_TYPE must be f32, f16 or bf16");
  return GGML_TYPE_F32;
}

static struct llama_context* open_context(struct llama_model* model, enum ggml_type type) {
  struct llama_context_params params = llama_context_default_params();
  params.n_ctx = params.n_batch = params.n_ubatch = MAX_TOKENS;
  params.n_threads = params.n_threads_batch = 1;
  params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_DISABLED;
  params.type_k = params.type_v = type;
  struct llama_context* context = llama_init_from_model(model, params);
  if (context == NULL) fail("there is no context for this model");
  return context;
}

static void fill(struct llama_batch* batch, char* line) {
  batch->n_tokens = 0;
  for (char* word = strtok(line, " \n"); word != NULL; word = strtok(NULL, " \n")) {
    int i = batch->n_tokens++;
    if (i == MAX_TOKENS) fail("a sequence is too long");
    batch->token[i] = atoi(word);
    batch->pos[i] = i;
    batch->n_seq_id[i] = 1;
    batch->seq_id[i][0] = 0;
    batch->logits[i] = 1;
  }
}

int main(int argc, char** argv) {
  if (argc != 3) fail("usage: llama_logits MODEL.gguf KV_TYPE");
  llama_log_set(log_errors, NULL);
  struct llama_model* model = llama_model_load_from_file(argv[1], llama_model_default_params());
  if (model == NULL) fail("the model cannot be loaded");
  struct llama_context* context = open_context(model, cache_type(argv[2]));
  size_t vocab_size = (size_t)llama_vocab_n_tokens(llama_model_get_vocab(model));
  struct llama_batch batch = llama_batch_init(MAX_TOKENS, 0, 1);
  char* line = malloc(MAX_LINE);
  while (line != NULL && fgets(line, MAX_LINE, stdin) != NULL) {
    fill(&batch, line);
    llama_memory_clear(llama_get_memory(context), true);
    if (llama_decode(context, batch) != 0) fail("a sequence cannot be computed");
    for (int i = 0; i < batch.n_tokens; i++) {
      fwrite(llama_get_logits_ith(context, i), sizeof(float), vocab_size, stdout);
    }
  }
  return fflush(stdout) != 0;
}
