"""Editing attention: forbid looks, switch heads off or replace their outputs, in any model."""
