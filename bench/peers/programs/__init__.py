"""Programs for the peers' own environments. They import the standard library and the peer, nothing of ours.

A program is given the model's directory. It reads batches from standard input, each a JSON line {"prompts": [[id, ...],
...], "output_lens": [n, ...]}, and answers with a line that begins with "peer: ": "ready", then the seconds of each
batch. What else the peer prints is not looked at.
"""
