//! The registry in a YAML file.
