"""Exports a checkpoint to a folder of graphs for ONNX Runtime and OpenVINO."""
