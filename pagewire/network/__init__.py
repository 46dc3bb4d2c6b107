"""The structure of a model, read from its files before any weight is loaded. An unsupported model can therefore be
refused before a process that computes is started."""
