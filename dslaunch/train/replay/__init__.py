"""Runs a window of micro-batches again and names what went inf or nan first: ``dslaunch replay``.

``window`` keeps and loads what a step was given, ``weights`` the weights it was given to;
``probe`` watches every module and parameter of one forward and backward pass; ``passes`` runs
such passes on an engine that has ended its training; ``bisect`` finds the samples; ``trace``
puts the answer together, ``describe`` in words. Nothing is imported here: a run that goes
well does not pay for it.
"""
