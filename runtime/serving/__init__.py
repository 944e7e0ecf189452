"""The frameworks that serve models: what turns npu_fuse on in each, by its own plug-in points."""
