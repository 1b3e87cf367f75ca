"""Replay: what a log shows after the fact, decided from its lines alone.

`kvlease.services.replay.checker.check_log` judges a file, `check` any sequence of events. The
parts: `reader` turns lines into events, `state` and `pages` rebuild who had what, one module a
family of events decides the rules, `verdict` is what comes out, `report` prints it. Nothing here
loads torch or trio.
"""
