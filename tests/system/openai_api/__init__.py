"""What becomes of every field of the gateway's HTTP APIs: data that docs/openai.md shows and a test sends."""
