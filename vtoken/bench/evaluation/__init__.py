"""The evaluation: the paper's section 5 on this machine, `vtoken bench evaluation`."""
