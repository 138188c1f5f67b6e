"""The hooks: each captures one way in which models attend, and passes the calls to the recorder."""
