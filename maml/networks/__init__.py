"""Networks as modules with explicit batch statistics; ``COMPONENTS`` lists a file's networks."""

from maml.networks.build import build_network as build_network
