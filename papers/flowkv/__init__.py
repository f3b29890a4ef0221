"""Reproduction of FlowKV: roles by weighted load indicators."""
