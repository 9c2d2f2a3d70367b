"""The only package that touches private APIs of torch: Dynamo's graphs, AOTAutograd, Inductor, tensor handles.

    frontend        from Dynamo's graph through AOTAutograd to our inner compiler     joint_passes, settings
    dynamo_graph    graphs before AOTAutograd                                         graph_breaks
    traced          graphs after it, with boundary and contract                       aot_graph, boundary, layouts,
                                                                                      tensor_lists
    traced_backward backwards inside Dynamo's graphs
    bodies          pieces of a graph, compiled for lanes                             cpp_wrapper, onednn,
                                                                                      vector_code
    whole           whole graphs, compiled as by Inductor alone
    interpret       bodies and whole graphs, run without a compiler
    attention_seeds backwards of attention that find the masks of replayed forwards
    compile_scope   settings and locks while Inductor compiles                        cxx_compiler, overrides
    aot_cache       compiled graphs in AOTAutograd's cache                            serialize
    handles         tensors as lanes without Python see them                          storages
    cuda_private    private CUDA functions of torch
    upstream_bugs   workarounds for defects of torch

Support for a new release of torch concerns this package alone. Before a method of torch is overridden, its signature is
compared with that of the installed torch (`signatures`); where they differ, the graph falls back.
"""
