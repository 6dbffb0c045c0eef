"""The lab of ispasp: the paper's algorithms to the letter, its experiments, benchmarks and the zoo.

Comes with a checkout (`pip install -e .`) and is not in the wheel.
"""
