"""Integrations: models that other packages have prepared."""
