"""The doors: each knows one way in which models attend, and hands calls to the recorder."""
