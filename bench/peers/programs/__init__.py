"""Programs for the peers' environments. They import only the standard library and the peer.

A program receives the model's directory as its argument. It reads batches from standard input, one JSON line each:
{"prompts": [[id, ...], ...], "output_lens": [n, ...]}. It answers with lines that begin with "peer: ": first "ready",
then the seconds of each batch. All other output of the peer is ignored.
"""
