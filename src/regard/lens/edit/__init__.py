"""Editing attention: what is forbidden, switched off or replaced, and how models are reached."""
