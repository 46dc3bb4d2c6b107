"""What becomes of every field of the gateway's HTTP APIs: data that docs/openai_fields.md shows and a test sends."""
