"""Runs the operators of PyTorch's own database (``op_db``) through Shorthaul and writes the page.

``samples`` chooses operators and inputs, ``judge`` runs them beside eager, ``workers`` gives them
processes with time limits, ``page`` writes ``docs/src/coverage.md``.
"""
