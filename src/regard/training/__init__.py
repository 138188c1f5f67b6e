"""Training: from a text file, or a file of sentence pairs, to a model."""
