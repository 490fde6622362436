"""SARATHI's tables and figures of one device, measured on the engine or from the cost model."""
