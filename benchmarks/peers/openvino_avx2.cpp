// Holds OpenVINO to AVX2 on a processor with AVX512, together with ONEDNN_MAX_CPU_ISA=AVX2: its own kernels, such as
// those of attention, request these functions, and oneDNN's that variable. With the variable alone, both disagree and a
// model with int8 weights does not compile.
//
//     c++ -shared -fPIC -O1 -o openvino_avx2.so benchmarks/peers/openvino_avx2.cpp
//     LD_PRELOAD=./openvino_avx2.so ONEDNN_MAX_CPU_ISA=AVX2 python benchmarks/peers/openvino_genai_bench.py ...

namespace ov {

bool with_cpu_x86_avx512f() { return false; }
bool with_cpu_x86_avx512_core() { return false; }
bool with_cpu_x86_avx512_core_vnni() { return false; }
bool with_cpu_x86_avx512_core_fp16() { return false; }
bool with_cpu_x86_bfloat16() { return false; }
bool with_cpu_x86_avx512_core_amx() { return false; }
bool with_cpu_x86_avx512_core_amx_bf16() { return false; }
bool with_cpu_x86_avx512_core_amx_fp16() { return false; }
bool with_cpu_x86_avx512_core_amx_int8() { return false; }

}  // namespace ov
