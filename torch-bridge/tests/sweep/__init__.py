"""Networks of other people's packages, each made tiny, compiled, and held against float64.

Finds what breaks on networks that nobody tuned Shorthaul for. ``transformers_networks`` and
``timm_networks`` make networks and inputs, ``tiny_configurations`` shrinks configurations,
``observe`` runs steps, ``compare`` judges them, ``run`` gives each network a process, and
``__main__`` is the command.
"""
