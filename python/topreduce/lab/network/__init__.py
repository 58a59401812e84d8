"""An emulated network: hosts in namespaces, links with a rate and a delay."""
