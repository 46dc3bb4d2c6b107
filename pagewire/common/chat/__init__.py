"""Chat templates, and parsers for the tool calls and the reasoning in a model's output."""
