"""The rules in pure Python: schema, ownership, state machines, messages, ports.

Nothing here imports torch or trio, so the rules can be checked without a device or a loop.
"""
