// Holds OpenVINO's own kernels, such as those of attention, to a lower instruction set than the processor's: they ask
// these functions, and oneDNN's ask ONEDNN_MAX_CPU_ISA. With that variable alone both disagree, and a model with int8
// weights does not compile. Without -DHELD_TO_AVX2, AVX512 with VNNI is left.
//
//     c++ -shared -fPIC -O1 -DHELD_TO_AVX2 -o openvino_held.so benchmarks/peers/openvino_held.cpp
//     LD_PRELOAD=./openvino_held.so ONEDNN_MAX_CPU_ISA=AVX2 python benchmarks/peers/openvino_genai_bench.py ...

namespace ov {

#ifdef HELD_TO_AVX2
bool with_cpu_x86_avx512f() { return false; }
bool with_cpu_x86_avx512_core() { return false; }
bool with_cpu_x86_avx512_core_vnni() { return false; }
#endif
bool with_cpu_x86_avx512_core_fp16() { return false; }
bool with_cpu_x86_bfloat16() { return false; }
bool with_cpu_x86_avx512_core_amx() { return false; }
bool with_cpu_x86_avx512_core_amx_bf16() { return false; }
bool with_cpu_x86_avx512_core_amx_fp16() { return false; }
bool with_cpu_x86_avx512_core_amx_int8() { return false; }

}  // namespace ov
