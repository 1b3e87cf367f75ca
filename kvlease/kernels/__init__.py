"""Compute: plain torch twins of every operation, the views that open rows, and the models.

Nothing here knows Trio, pools or requests; a kernel sees packed rows, handles and numbers.
"""
