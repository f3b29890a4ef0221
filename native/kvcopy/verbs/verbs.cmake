# RDMA verbs: built where libibverbs and its header are (Debian: libibverbs-dev), left out elsewhere.
find_path(IBVERBS_INCLUDE_DIR infiniband/verbs.h)
find_library(IBVERBS_LIBRARY ibverbs)
if(IBVERBS_INCLUDE_DIR AND IBVERBS_LIBRARY)
  set(VERBS_FOLDER ${CMAKE_CURRENT_LIST_DIR})
  nanobind_add_module(verbs NB_STATIC
    ${VERBS_FOLDER}/bindings/verbs.cpp
    ${VERBS_FOLDER}/src/device.cpp
    ${VERBS_FOLDER}/src/queue_pair.cpp)
  target_include_directories(verbs PRIVATE ${VERBS_FOLDER}/include ${IBVERBS_INCLUDE_DIR})
  target_link_libraries(verbs PRIVATE ${IBVERBS_LIBRARY})
  millrace_module(verbs)
else()
  message(STATUS "libibverbs not found: no RDMA verbs in this build")
endif()
