# millrace_native.kvcopy_cuda, where CUDA's headers and static runtime (12.8 or later) are there; nowhere needed. It
# holds no kernels, so no CUDA compiler is needed: NVIDIA's wheels nvidia-cuda-runtime and nvidia-cuda-crt are enough.
option(MILLRACE_CUDA "Build the CUDA copier where CUDA's headers and static runtime are found" ON)

# find_package(CUDAToolkit) goes by the compiler, which the wheels lack.
function(millrace_cuda_of_wheels)
  execute_process(
    COMMAND ${Python_EXECUTABLE} -c "import sysconfig; print(sysconfig.get_path('purelib'))"
    OUTPUT_VARIABLE site OUTPUT_STRIP_TRAILING_WHITESPACE)
  find_path(MILLRACE_CUDA_INCLUDE cuda_runtime_api.h PATHS ${site}/nvidia/cu13/include NO_DEFAULT_PATH)
  find_library(MILLRACE_CUDART libcudart_static.a PATHS ${site}/nvidia/cu13/lib NO_DEFAULT_PATH)
  if(MILLRACE_CUDA_INCLUDE AND MILLRACE_CUDART AND EXISTS ${MILLRACE_CUDA_INCLUDE}/crt/host_defines.h)
    find_package(Threads REQUIRED)
    add_library(CUDA::cudart_static STATIC IMPORTED GLOBAL)
    set_target_properties(CUDA::cudart_static PROPERTIES
      IMPORTED_LOCATION ${MILLRACE_CUDART}
      INTERFACE_INCLUDE_DIRECTORIES ${MILLRACE_CUDA_INCLUDE}
      INTERFACE_LINK_LIBRARIES "Threads::Threads;${CMAKE_DL_LIBS};rt")
  endif()
endfunction()

if(MILLRACE_CUDA)
  find_package(CUDAToolkit 12.8 QUIET)
  if(NOT TARGET CUDA::cudart_static)
    millrace_cuda_of_wheels()
  endif()
  if(TARGET CUDA::cudart_static)
    nanobind_add_module(kvcopy_cuda NB_STATIC kvcopy/cuda/kvcopy_cuda.cpp kvcopy/cuda/cuda_copy.cpp)
    target_include_directories(kvcopy_cuda PRIVATE kvcopy/cuda)
    target_link_libraries(kvcopy_cuda PRIVATE CUDA::cudart_static)
    millrace_module(kvcopy_cuda)
  else()
    message(STATUS "no CUDA headers with a static runtime: the CUDA copier is not built")
  endif()
endif()
