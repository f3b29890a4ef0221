"""Actors, the effects they return, the ports behind them, and the runtime on NATS."""
