"""An Ascend NPU without an NPU: the real torch_npu wheel on a simulated runtime. See README.md."""
