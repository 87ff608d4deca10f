# Installs the client into WORK_DIR and builds a consumer against it, with find_package and with pkg-config.
function(run output)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE status OUTPUT_VARIABLE text ERROR_VARIABLE errors)
  if(NOT status EQUAL 0)
    message(FATAL_ERROR "failed (${status}): ${ARGN}\n${text}\n${errors}")
  endif()
  string(STRIP "${text}" text)
  set(${output} "${text}" PARENT_SCOPE)
endfunction()

file(REMOVE_RECURSE ${WORK_DIR})
set(prefix ${WORK_DIR}/prefix)
run(ignored ${CMAKE_COMMAND} --install ${BUILD_DIR} --component client --prefix ${prefix})

run(ignored ${CMAKE_COMMAND} -S ${CONSUMER_DIR} -B ${WORK_DIR}/build -DCMAKE_PREFIX_PATH=${prefix}
    -DEPD_WANTED=${VERSION} -DCMAKE_C_COMPILER=${C_COMPILER} -DCMAKE_CXX_COMPILER=${CXX_COMPILER})
run(ignored ${CMAKE_COMMAND} --build ${WORK_DIR}/build)
foreach(program consumer_c consumer_cpp)
  run(version ${WORK_DIR}/build/${program})
  if(NOT version STREQUAL VERSION)
    message(FATAL_ERROR "${program} runs with libepd ${version}, not ${VERSION}")
  endif()
endforeach()
# A consumer that wants another minor release must not get this one.
execute_process(COMMAND ${CMAKE_COMMAND} -S ${CONSUMER_DIR} -B ${WORK_DIR}/refused -DCMAKE_PREFIX_PATH=${prefix}
    -DEPD_WANTED=99.0 -DCMAKE_C_COMPILER=${C_COMPILER} -DCMAKE_CXX_COMPILER=${CXX_COMPILER}
    RESULT_VARIABLE status OUTPUT_QUIET ERROR_QUIET)
if(status EQUAL 0)
  message(FATAL_ERROR "find_package(epd 99.0) found ${VERSION}")
endif()

find_program(pkg_config pkg-config)
if(NOT pkg_config)
  message(FATAL_ERROR "pkg-config is missing (package pkg-config)")
endif()
set(ENV{PKG_CONFIG_PATH} ${prefix}/${LIBDIR}/pkgconfig)
run(version ${pkg_config} --modversion epd)
if(NOT version STREQUAL VERSION)
  message(FATAL_ERROR "epd.pc says ${version}, not ${VERSION}")
endif()
run(flags ${pkg_config} --cflags --libs epd)
separate_arguments(flags UNIX_COMMAND "${flags}")
run(ignored ${C_COMPILER} -std=c11 ${CONSUMER_DIR}/consumer.c ${flags} -Wl,-rpath,${prefix}/${LIBDIR} -o ${WORK_DIR}/pc)
run(version ${WORK_DIR}/pc)
