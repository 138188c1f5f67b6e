"""Data for training: files to texts, texts to ids on disk, ids to batches by seed and step."""
