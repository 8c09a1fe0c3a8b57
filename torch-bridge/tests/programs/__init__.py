"""Small programs, each run beside eager PyTorch, that find silent differences.

``registry`` holds the programs, ``facts`` says what can be observed of a result, ``compare`` judges
two observations, ``run`` runs one program under one wrap, ``perturb`` holds wraps that are wrong on
purpose, and ``__main__`` is the command. The other files are programs, one theme each.
"""
