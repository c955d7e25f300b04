"""The versions of a model. A reload replaces the version that is served with a new one."""
