"""Models: from checkpoints to hidden states to logits. The modules here do not depend on the paged KV cache."""
