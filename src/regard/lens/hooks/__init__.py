"""The hooks: each knows one way in which models attend, and gives calls to the recorder."""
