"""The only package that touches private APIs of torch: Dynamo's graphs, AOTAutograd, Inductor, tensor handles.

    frontend        from Dynamo's graph through AOTAutograd to our inner compiler     joint_passes, settings
    dynamo_graph    graphs before AOTAutograd                                         graph_breaks
    aot_graph       graphs after it                                                   boundary, layouts
    bodies          pieces of a graph, compiled for lanes                             cpp_wrapper, onednn
    whole           a graph, compiled as Inductor alone would
    interpret       either of them, without a compiler
    compile_scope   what is in force while any of this compiles                       cxx_compiler, overrides
    aot_cache       compiled graphs in AOTAutograd's cache                            serialize
    handles         tensors as lanes without Python see them                          storages
    cuda_private    what torch.cuda does not offer publicly
    upstream_bugs   defects of torch that we work around

A new release of torch is the business of this package alone. Methods of torch that are overridden are compared with the
torch at hand first (`signatures`); where they differ, nothing is guessed.
"""
